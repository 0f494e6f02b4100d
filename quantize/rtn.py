"""Round to nearest: quantization without data, with one decoder layer in memory at a time.

llm-compressor itself computes the bits: we feed the converter behind its `model_free_ptq` layer by layer. That function
reads whole files, of which one may hold 50 GB, and quantizes the embeddings unless told not to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from qerl.errors import CheckpointError
from quantize.source import Source

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationConfig

Tensors = dict[str, "torch.Tensor"]


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
