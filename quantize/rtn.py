"""Round to nearest: quantization without data, with one decoder layer in memory at a time.

llm-compressor itself computes the bits: we feed the converter behind its `model_free_ptq` layer by layer. That function
reads whole files, of which one may hold 50 GB, and quantizes the embeddings unless told not to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from qerl.errors import CheckpointError
from quantize.source import Source

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationConfig

Tensors = dict[str, "torch.Tensor"]
ScaleOf = Callable[[Sequence[str], Sequence["torch.Tensor"]], "torch.Tensor"]  # of the modules and weights of one set


def rtn_groups(
    source: Source, config: QuantizationConfig, read: Callable[[str], torch.Tensor], device: torch.device
) -> Iterator[Tensors]:
    """The tensors to write, on the CPU, one group of `source.groups()` at a time.

    A group holds a whole layer, so q/k/v and gate/up reach the converter together and share their global scales.
    Raises CheckpointError for a tensor with NaN or infinity.
    """
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

    converter = ModelFreePtqConverter(config)
    chosen = {f"{module}.weight" for module in source.quantized}
    for names in source.groups():
        written = {name: finite(name, read(name)) for name in names if name not in chosen}
        weights = {name: weight_for_scales(name, read(name)).to(device) for name in names if name in chosen}
        if weights:
            written |= {name: tensor.cpu().contiguous() for name, tensor in converter.process(weights).items()}
        yield written


def packed_groups(
    source: Source, read: Callable[[str], torch.Tensor], device: torch.device, scale_of: ScaleOf | None = None
) -> Iterator[Tensors]:
    """`rtn_groups` by the format's own arithmetic, which is the same for NVFP4.

    `scale_of` gives the scale that linears which engines fuse share; without it the format derives it from them.
    """
    chosen = {f"{module}.weight" for module in source.quantized}
    sets = {f"{modules[0]}.weight": modules for modules in source.fused_sets()}
    for names in source.groups():
        written = {name: finite(name, read(name)) for name in names if name not in chosen}
        for modules in (sets[name] for name in names if name in sets):
            own = [f"{module}.weight" for module in modules]
            weights = [weight_for_scales(name, read(name)).to(device) for name in own]
            packed = source.format.quantize(weights, scale_of(modules, weights) if scale_of else None)
            for module, tensors in zip(modules, packed, strict=True):
                written |= {f"{module}.{part}": tensor.cpu().contiguous() for part, tensor in tensors.items()}
        yield written


def power_of_two_scale_of(earlier: Mapping[str, torch.Tensor] | None = None) -> ScaleOf:
    """NVFP4's global scale (1,) as a power of two, for `packed_groups`.

    `earlier` has scales, by module, of linears that were quantized before: they stay unless the weights have outgrown
    them.
    """
    from qerl.nvfp4.reference import shared_global_scale

    def scale_of(modules: Sequence[str], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        scale = shared_global_scale(weights, "pow2")
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
    if not all(bound.isfinite() for bound in tensor.aminmax()):  # aminmax makes no copy: embeddings are large
        raise CheckpointError(f"{name} holds NaN or infinity: the checkpoint is damaged, take another copy")
    return tensor
