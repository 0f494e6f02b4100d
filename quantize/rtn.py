"""Round to nearest: quantization without data, with one decoder layer in memory at a time.

llm-compressor itself computes the bits: we feed the converter behind its `model_free_ptq` layer by layer. That function
reads whole files, of which one may hold 50 GB, and quantizes the embeddings unless told not to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from qerl.checkpoint.source import Source, Tensors, finite, weight_for_scales

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationConfig


def rtn_groups(
    source: Source, config: QuantizationConfig, read: Callable[[str], torch.Tensor], device: torch.device
) -> Iterator[Tensors]:
    """The tensors to write, on the CPU, one group of `source.groups()` at a time.

    A group holds a whole layer, so q/k/v and gate/up reach the converter together and share their global scales.
    Raises CheckpointError for a tensor with NaN or infinity.
    """
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

    converter = ModelFreePtqConverter(config)
    for names in source.groups():
        written = {name: finite(name, read(name)) for name in names if name not in source.chosen}
        weights = {name: weight_for_scales(name, read(name)).to(device) for name in names if name in source.chosen}
        if weights:
            written |= {name: tensor.cpu().contiguous() for name, tensor in converter.process(weights).items()}
        yield written
