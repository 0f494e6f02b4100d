"""Static scales of activations, from each linear's inputs over calibration rows, one decoder layer in memory at a time.

They are what a run with `nvfp4_w4a4_static` computes with the whole model (`qerl.checkpoint.activations`): powers of
two with head room, for rows that the calibration has not seen and for training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qerl.checkpoint.activations import scales_of
from qerl.checkpoint.source import Source
from qerl.checkpoint.verify import ReadTensor
from quantize.streams import LayeredModel

if TYPE_CHECKING:
    import torch

HEADROOM_BITS = 2  # as in a run (qat.quant_cfg.weights.headroom_bits)


def streamed_input_scales(
    source: Source, read: ReadTensor, rows: Sequence[Sequence[int]], device: torch.device, advance: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """float32 (1,) by quantized module of `source`, whose tensors `read` gives, on `rows` of token ids.

    Linears that read the same input, as those which engines fuse do, have the same scale. `advance` is called after
    each layer. Raises CheckpointError for inputs that hold inf or NaN, or are zero throughout.
    """
    import torch

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    amax = {name: torch.zeros((), device=device) for name in source.quantized}

    def see(module: str, inputs: torch.Tensor) -> None:
        if module in amax:
            amax[module] = torch.maximum(amax[module], inputs.abs().amax().float())

    def load(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: read(name).to(device, dtype) for name in names}

    before, *layers, after = source.groups()
    with torch.inference_mode():
        model = LayeredModel(source, dtype, device)
        hidden = model.embed([torch.tensor([row], device=device) for row in rows], load(before + after))
        for number, names in enumerate(layers):
            model.step(number, load(names), hidden, see)
            advance()
    return scales_of(amax, HEADROOM_BITS, f"{len(rows)} calibration sequences (--calibration)")
