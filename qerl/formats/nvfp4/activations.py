"""Activations in NVFP4: what a linear multiplies by, rounded to e2m1 codes under e4m3 block scales, as weights are.

A block is 16 neighbours along the last axis. The arithmetic is as in `reference.quantize` and `dequantize`, so that
it is bit-exact with what compressed-tensors 0.19 computes on activations under its scheme NVFP4 (`forward_quantize`,
compressed_tensors/quantization/lifecycle/forward.py). What the global scale is, is ours to say:

    static    one number per linear, from calibration (`input_global_scale` of a checkpoint)
    dynamic   one per row, computed on the fly: the power of two that brings the row's amax to [2^10, 2^11)

A row is a token, so neither depends on what else is in a batch: trainer and engine, prefill and decode steps round
alike. An amax over the whole tensor would not do. A power of two moves no block scale but those at the lower end of
e4m3's range, so where two computations of a row differ in a last bit, only that block can change; 2688 / amax would
move all of them.

1. A block with inf or NaN becomes NaN; it does not count in the amax of its row. compressed-tensors clips inf instead.
2. vLLM's kernels divide amax by 6 in float32, and compressed-tensors in the activations' own dtype. In bfloat16 1 to 5
   block scales in a hundred differ by one step; in float32 almost none.
3. Dynamic scales clip nothing but what a rounded block scale cuts off. Under a static one, blocks above
   2688 / global_scale saturate.
"""

from dataclasses import dataclass

import torch

from qerl.formats.nvfp4.layout import BLOCK, SCALE_MAX
from qerl.formats.nvfp4.reference import ZERO_SCALE, decode_e2m1, encode_e2m1, exact_block_scales

ROW_EXPONENT = 264  # exponent bits of a row's global scale and of its amax add up to this: 2^10 / 2^floor(log2(amax))
SMALLEST_EXPONENT = 64  # of an amax (2^-63): the scales of smaller ones are not larger


@dataclass(frozen=True)
class Activations:
    """How a linear rounds its input; `global_scale` is a float32 number, None for one per row."""

    global_scale: float | None = None

    @property
    def kind(self) -> str:
        """What a recipe calls it."""
        return "dynamic" if self.global_scale is None else "static"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) rounded, in its own dtype: by a kernel on a GPU, by its twin elsewhere."""
        if not x.is_cuda:
            return round_by_twin(x, self.global_scale)
        from qerl.formats.nvfp4.kernels import round_by_kernel

        return round_by_kernel(x, self.global_scale)


def round_by_twin(x: torch.Tensor, global_scale: float | None = None) -> torch.Tensor:
    """x (..., K) of float32 or bfloat16 with K a multiple of 16, rounded to NVFP4, in its own dtype."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    finite = blocks.isfinite().all(dim=-1, keepdim=True)
    blocks = blocks.where(finite, 0)
    scale = row_scales(blocks) if global_scale is None else torch.full((1,), global_scale, device=x.device)
    block_scale = exact_block_scales(blocks, scale).clamp(max=SCALE_MAX).to(torch.float8_e4m3fn).float()
    step = (block_scale.where(block_scale != 0, ZERO_SCALE) / scale).unsqueeze(-1)
    rounded = decode_e2m1(encode_e2m1(blocks / step)) * step
    return rounded.where(finite, torch.nan).flatten(-2).to(x.dtype)


def row_scales(blocks: torch.Tensor) -> torch.Tensor:
    """float32 (..., 1): the dynamic global scale of each row, for finite blocks (..., K / 16, 16)."""
    amax = blocks.abs().amax(dim=(-2, -1)).float().unsqueeze(-1)
    exponent = (amax.view(torch.int32) >> 23).clamp(min=SMALLEST_EXPONENT)
    return ((ROW_EXPONENT - exponent) << 23).view(torch.float32)
