"""Round activations to NVFP4 in Triton: the fast twin of `activations.round_by_twin`, to the same bits.

Its limit is the memory's speed: 2 bytes read and 2 written per bfloat16 value. With dynamic scales a row is read once
for its amax, and again, from the cache, to be rounded. Few rows, as in a decode step, are split over several programs,
each of which takes the amax of the whole row. A launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qerl.formats.nvfp4.activations import ROW_EXPONENT, SMALLEST_EXPONENT
from qerl.formats.nvfp4.layout import BLOCK, CODE_MAX, SCALE_MAX
from qerl.formats.nvfp4.reference import ZERO_SCALE

BLOCKS = 128  # per step of a program: 2048 columns
WARPS = 4
FILLED = 264  # programs from which on a row is not split further: two for each multiprocessor of an H200

_ROW_EXPONENT, _SMALLEST = tl.constexpr(ROW_EXPONENT), tl.constexpr(SMALLEST_EXPONENT)
_CODE_MAX, _SCALE_MAX, _ZERO_SCALE = tl.constexpr(CODE_MAX), tl.constexpr(SCALE_MAX), tl.constexpr(ZERO_SCALE)


@triton.jit
def _finite_size(x):
    """|x| of float32 x, and 0 for inf and NaN."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _e4m3(x):
    """The nearest e4m3 value of float32 x in [0, 448], ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (x + 16384.0) - 16384.0  # the last place of 2^14 is 2^-9, the step of e4m3's subnormal values
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def _e2m1(size):
    """The nearest e2m1 value of float32 sizes, ties to the even code."""
    value = tl.where(size > 0.25, 0.5, 0.0)
    value = tl.where(size >= 0.75, 1.0, value)
    value = tl.where(size > 1.25, 1.5, value)
    value = tl.where(size >= 1.75, 2.0, value)
    value = tl.where(size > 2.5, 3.0, value)
    value = tl.where(size >= 3.5, 4.0, value)
    return tl.where(size > 5.0, 6.0, value)


@triton.jit
def _round(x_ptr, out_ptr, columns, global_scale, DYNAMIC: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    inner = tl.arange(0, BLOCKS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tile: tl.constexpr = BLOCKS * WIDTH
    if DYNAMIC:
        sizes = tl.zeros((BLOCKS, WIDTH), tl.float32)
        for start in range(0, columns, tile):
            x = tl.load(x_ptr + row + start + inner, mask=start + inner < columns, other=0.0).to(tl.float32)
            # A block with inf or NaN counts as zeros.
            whole = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1)[:, None]
            sizes = tl.maximum(sizes, tl.where(whole == 1, tl.abs(x), 0.0))
        exponent = tl.maximum(tl.max(tl.max(sizes, 1), 0).to(tl.int32, bitcast=True) >> 23, _SMALLEST)
        global_scale = ((-exponent + _ROW_EXPONENT) << 23).to(tl.float32, bitcast=True)
    for start in range(tl.program_id(1) * tile, columns, tl.num_programs(1) * tile):
        inside = start + inner < columns
        x = tl.load(x_ptr + row + start + inner, mask=inside, other=0.0)
        wide = x.to(tl.float32)
        whole = tl.min((tl.abs(wide) < float("inf")).to(tl.int32), 1)
        amax = tl.max(_finite_size(wide), 1)
        sixth = tl.div_rn(amax, tl.full((BLOCKS,), _CODE_MAX, tl.float32)).to(x.dtype).to(tl.float32)
        block_scale = _e4m3(tl.minimum(sixth * global_scale, _SCALE_MAX))
        block_scale = tl.where(block_scale == 0.0, _ZERO_SCALE, block_scale)
        step = tl.div_rn(block_scale, tl.zeros_like(block_scale) + global_scale)[:, None]
        value = _e2m1(tl.div_rn(tl.abs(wide), tl.broadcast_to(step, (BLOCKS, WIDTH)))) * step
        # The sign is set as a bit, because Triton's -x is 0 - x, which would turn a negative zero into a positive one.
        sign = (wide < 0.0).to(tl.int32) << 31
        value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        value = tl.where(whole[:, None] == 1, value, float("nan"))
        tl.store(out_ptr + row + start + inner, value.to(x.dtype), mask=inside)


def round_by_kernel(x: torch.Tensor, global_scale: float | None = None) -> torch.Tensor:
    """See the twin."""
    x = x.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // columns
    if rows:
        splits = max(1, min(triton.cdiv(columns, BLOCKS * BLOCK), FILLED // rows))
        scale = 1.0 if global_scale is None else global_scale
        _round[(rows, splits)](
            x, out, columns, scale, DYNAMIC=global_scale is None, BLOCKS=BLOCKS, WIDTH=BLOCK, num_warps=WARPS
        )
    return out
