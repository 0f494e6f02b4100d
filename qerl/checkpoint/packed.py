"""Pack a 16-bit checkpoint's linears by their format's own arithmetic, one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.checkpoint.source import Source

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
ScaleOf = Callable[[Sequence[str], Sequence["torch.Tensor"]], "torch.Tensor"]  # of the modules and weights of one set


def packed_groups(
    source: Source, read: Callable[[str], torch.Tensor], device: torch.device, scale_of: ScaleOf | None = None
) -> Iterator[Tensors]:
    """The tensors to write, on the CPU, one group of `source.groups()` at a time.

    A group holds a whole layer, so that linears which engines fuse (q/k/v, gate/up) are packed together. `scale_of`
    gives the scale that these share; without it the format derives it from them. Raises CheckpointError for a tensor
    with NaN or infinity.
    """
    sets = {f"{modules[0]}.weight": modules for modules in source.fused_sets()}
    for names in source.groups():
        written = {name: finite(name, read(name)) for name in names if name not in source.chosen}
        for modules in (sets[name] for name in names if name in sets):
            own = [f"{module}.weight" for module in modules]
            weights = [weight_for_scales(name, read(name)).to(device) for name in own]
            packed = source.format.quantize(weights, scale_of(modules, weights) if scale_of else None)
            for module, tensors in zip(modules, packed, strict=True):
                written |= {f"{module}.{part}": tensor.cpu().contiguous() for part, tensor in tensors.items()}
        yield written


def power_of_two_scale_of(earlier: Mapping[str, torch.Tensor] | None = None, headroom_bits: int = 0) -> ScaleOf:
    """NVFP4's global scale (1,) as a power of two, for `packed_groups`.

    `headroom_bits`: by how many powers of two the weights may grow under it. `earlier` has scales, by module, of
    linears that were quantized before: they stay unless the weights have outgrown them.
    """
    from qerl.formats.nvfp4.reference import shared_global_scale

    def scale_of(modules: Sequence[str], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        scale = shared_global_scale(weights, "pow2", headroom_bits)
        for module in modules:
            scale = scale.minimum((earlier or {}).get(module, scale).to(scale.device))
        return scale

    return scale_of


def weight_for_scales(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight in the dtype in which its scales are computed: float32 for float16, else its own.

    A float16 global scale overflows if amax is under 0.041, and llm-compressor then writes 1.0. Raises CheckpointError
    for NaN and infinity, which llm-compressor would turn into scales of NaN and 0.
    """
    import torch

    weight = finite(name, weight)
    return weight.float() if weight.dtype == torch.float16 else weight


def finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged. Raises CheckpointError if it holds NaN or infinity."""
    if not all_finite(tensor):
        raise CheckpointError(f"{name} holds NaN or infinity: the checkpoint is damaged, take another copy")
    return tensor


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any size holds neither NaN nor infinity."""
    return all(bound.isfinite() for bound in tensor.aminmax())  # aminmax makes no copy: embeddings are large
