"""What every quantized format asks of a weight before it quantizes it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qerl.base.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dense(weight: torch.Tensor, label: str, check_features: Callable[[int, int], None]) -> None:
    """Raise CheckpointError unless `weight` is a finite matrix (out, in) of `DTYPES` whose size the format takes.

    `label` is the format's, for the message; `check_features` raises for a size that it cannot pack.
    """
    if weight.ndim != 2 or weight.dtype not in DTYPES:
        raise CheckpointError(
            f"cannot quantize {weight.dtype} {tuple(weight.shape)} to {label}: it takes a 16- or 32-bit float weight "
            "(out, in), so a model that is quantized already has to be made from its 16-bit one"
        )
    check_features(*weight.shape)
    if not weight.isfinite().all():
        raise CheckpointError(
            f"cannot quantize a weight of shape {tuple(weight.shape)} that holds inf or NaN: the 16-bit checkpoint is "
            "damaged, or training went wrong"
        )
