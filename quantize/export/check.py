"""Open an exported model again and compare it bit by bit with what the masters give once more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.export import Masters, dense_tensors, packed_tensors
from qerl.checkpoint.folder import format_of
from qerl.checkpoint.reader import TensorReader
from qerl.checkpoint.shards import read_tensors
from qerl.checkpoint.source import Tensors
from qerl.checkpoint.verify import FailedCheck, check_head, sqnr_db

if TYPE_CHECKING:
    import torch


def check_written(
    masters: Masters, folder: Path, device: torch.device, track: Callable = iter, dense: bool = False
) -> float | None:
    """Compare the model in `folder` with `masters`, whose linears it holds packed or, if `dense`, in bfloat16.

    Returns the lowest SQNR of its trained weights to their masters, in dB; None if all are exact. Raises FailedCheck.
    """
    if format_of(folder).quantized == dense:
        raise FailedCheck(f"config.json says that it is {format_of(folder).label}")
    check_head(folder)
    found, lowest = read_tensors(folder), math.inf
    left = set(found)
    with TensorReader(found) as read, masters.reader() as wide:
        for group in track(dense_tensors(masters) if dense else packed_tensors(masters, device)):
            for name, tensor in group.items():
                if name not in left:
                    raise FailedCheck(f"{name} is missing")
                _check_same(name, read(name), tensor)
            left -= group.keys()
            for name, weight in _weights(masters, group):
                lowest = min(lowest, sqnr_db(wide(name).float(), weight) or math.inf)
    if left:
        raise FailedCheck(f"{min(left)} is unexpected")
    return lowest if math.isfinite(lowest) else None


def _check_same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    import torch

    same = found.dtype == expected.dtype and found.shape == expected.shape
    if not same or not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
        raise FailedCheck(f"{name} is not the tensor that was to be written")


def _weights(masters: Masters, group: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The trained weights in a group as they will be multiplied by, in float32."""
    import torch

    format = masters.format
    for name in group:
        module, _, part = name.rpartition(".")
        weight = f"{module}.weight"
        parts = {each: group.get(f"{module}.{each}") for each in format.tensors}
        if weight in masters.trained and part == format.tensors[0] and None not in parts.values():
            yield weight, format.dequantize(parts, torch.float32)  # its codes may be named `weight`, too
        elif name in masters.trained:
            yield name, group[name].float()
