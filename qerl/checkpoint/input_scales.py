"""Static scales of activations, NVFP4's `input_global_scale`: from the largest input of each linear over some rows.

Like the weights' global scales they are powers of two with head room, so that rounded activations are exact in
bfloat16, and activations may grow in training before blocks saturate. Linears that read the same input have the same
amax, so that those which engines fuse share their scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.checkpoint.activations import INPUT_SCALE
from qerl.formats.nvfp4.layout import PACKED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from qerl.checkpoint.packed import Tensors


def input_scales(
    model: PreTrainedModel, modules: Sequence[str], rows: Sequence[Sequence[int]], batch: int, headroom_bits: int
) -> dict[str, torch.Tensor]:
    """float32 (1,) by module name, for a 16-bit `model` on `rows` of token ids.

    `batch` rows of equal length take one forward pass; `headroom_bits`: by how many powers of two activations may grow.
    Raises CheckpointError for a linear whose input holds inf or NaN, or is zero throughout.
    """
    import torch

    with torch.no_grad(), _largest_inputs(model, modules) as amax:
        for ids in _batches(rows, batch):
            model(input_ids=torch.tensor(ids, device=model.device), use_cache=False, logits_to_keep=1)
    return scales_of(amax, headroom_bits, f"{len(rows)} calibration rows (qat.quant_cfg.calibration)")


def scales_of(amax: Mapping[str, torch.Tensor], headroom_bits: int, rows: str) -> dict[str, torch.Tensor]:
    """float32 (1,) by module name, for the amax of each linear's input over `rows`, in words."""
    from qerl.formats.nvfp4.reference import power_of_two_scale  # it imports torch

    scales = {}
    for name, value in amax.items():
        if not 0 < (largest := value.item()) < float("inf"):
            raise CheckpointError(
                f"the input of {name} has the amax {largest:g} over {rows}, from which no scale follows: check the "
                "rows and the 16-bit model, or take dynamic scales"
            )
        scales[name] = power_of_two_scale(largest, headroom_bits)
    return scales


def with_input_scales(groups: Iterable[Tensors], scales: Mapping[str, torch.Tensor]) -> Iterator[Tensors]:
    """The tensors of `groups`, each packed linear's static scale beside its weight."""
    for group in groups:
        own = {f"{module}.{INPUT_SCALE}": scale for module, scale in scales.items() if f"{module}.{PACKED}" in group}
        yield group | own


@contextmanager
def _largest_inputs(model: PreTrainedModel, modules: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """The amax of each linear's input so far, float32 on the model's device; NaN once one was seen."""
    import torch

    amax = {name: torch.zeros((), device=model.device) for name in modules}

    def watch(name: str) -> Callable:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            amax[name] = torch.maximum(amax[name], inputs[0].abs().amax().float())

        return hook

    # With a hook a linear is called as a module, so that the fused layers do not pass it by.
    hooks = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in modules]
    try:
        yield amax
    finally:
        for hook in hooks:
            hook.remove()


def _batches(rows: Sequence[Sequence[int]], size: int) -> Iterator[list[list[int]]]:
    """Rows in their order; those of one batch have the same length, so that no padding is seen."""
    pending: list[list[int]] = []
    for ids in rows:
        if pending and (len(pending) == size or len(ids) != len(pending[0])):
            yield pending
            pending = []
        pending.append(list(ids))
    if pending:
        yield pending
