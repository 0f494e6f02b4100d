"""Decode a linear from its GEMM kernel's layout into a dense work buffer, in Triton where our CUDA sources do not run.

The fast twin of `qerl.formats.nvfp4.kernel_layout`: the same words give the same bits. It needs triton, so it is
imported only where an engine's tensors are read. Our own layout is decoded by `decode.py`; what its kernel cannot write
(scaled values, other dtypes, other cards) goes through plain torch, a few rows at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from qerl.formats.nvfp4.decode import dequantize_by_twin_
from qerl.formats.nvfp4.kernel_layout import QERL, TILE_ROWS, KernelWeight
from qerl.formats.nvfp4.layout import BLOCK

if TYPE_CHECKING:
    from qerl.formats.nvfp4.kernel_experts import KernelExperts

BLOCKS_PER_PROGRAM = 8  # a program writes 64 rows of 8 * 16 columns: 256 contiguous bytes per row


@triton.jit
def _decode_block_scale(stored, MARLIN: tl.constexpr):
    """The float32 value of a stored scale byte: e4m3, or Marlin's unsigned e5m3 (bias 22)."""
    stored = stored.to(tl.int32)
    mantissa = stored & 7
    if MARLIN:
        bits = ((stored >> 3) + 105) << 23 | mantissa << 20
        return tl.where(stored == 0, 0.0, bits.to(tl.float32, bitcast=True))
    exponent = (stored >> 3) & 15
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    return tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _decode_e2m1(code):
    """The float32 value of a 4-bit code."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    # The sign is set as a bit, because Triton's -x is 0 - x, which would turn code 8 into +0.0.
    return (magnitude.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _dequantize_kernel(
    words_ptr,
    scales_ptr,
    out_ptr,
    row_start,
    rows,
    columns,
    out_padded,
    inverse_factor,
    global_scale,
    TRANSPOSED: tl.constexpr,
    MARLIN: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """With EXPERTS, the third axis of the grid is that of the experts, and `global_scale` points to their scales."""
    if EXPERTS:
        expert = tl.program_id(2).to(tl.int64)
        words_ptr += expert * (columns // 16) * (2 * out_padded)
        scales_ptr += expert * (columns // 16) * out_padded
        out_ptr += expert * rows * columns
        global_scale = tl.load(global_scale + expert)
    tile = row_start // 64 + tl.program_id(1)
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < columns // 16
    lane = tl.arange(0, 32)
    word = tl.arange(0, 4)
    words = tl.load(
        words_ptr
        + blocks[:, None, None].to(tl.int64) * (2 * out_padded)
        + tile * 128
        + lane[None, :, None] * 4
        + word[None, None, :],
        mask=inside[:, None, None],
        other=0,
    )
    nibble = tl.arange(0, 8)
    codes = (words[:, :, :, None] >> (nibble[None, None, None, :] * 4)) & 15
    # axes: block, lane_hi, lane_lo, word, then the three bits of the nibble (odd first)
    codes = tl.reshape(codes, (BLOCKS, 8, 4, 4, 2, 2, 2))
    if TRANSPOSED:  # noqa: SIM108 - odd, upper, half
        codes = tl.permute(codes, (3, 6, 1, 0, 5, 2, 4))
    else:  # odd, half, upper
        codes = tl.permute(codes, (3, 5, 1, 0, 6, 2, 4))
    codes = tl.reshape(codes, (64, BLOCKS, 16))

    row = tl.arange(0, 64)
    group = row // 8
    if MARLIN:
        group = (group & 4) | ((group & 1) << 1) | ((group >> 1) & 1)
    stored = tl.load(
        scales_ptr + blocks[None, :].to(tl.int64) * out_padded + (tile * 64 + (row % 8) * 8 + group)[:, None],
        mask=inside[None, :],
        other=0,
    )
    scales = _decode_block_scale(stored, MARLIN)
    if SCALED:
        scales = tl.div_rn(scales * inverse_factor, scales * 0.0 + global_scale)  # a plain / is approximate
    values = _decode_e2m1(codes) * scales[:, :, None]
    values = tl.reshape(values, (64, BLOCKS * 16))

    out_row = tile * 64 + row - row_start
    column = tl.program_id(0) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    tl.store(
        out_ptr + out_row[:, None].to(tl.int64) * columns + column[None, :],
        values.to(out_ptr.dtype.element_ty),
        mask=((out_row >= 0) & (out_row < rows))[:, None] & (column < columns)[None, :],
    )


def decode_(out: torch.Tensor, weight: KernelWeight, row_start: int = 0) -> torch.Tensor:
    """`dequantize_` with scaled=False, by the faster CUDA kernel for bfloat16 on cards that run it."""
    from qerl.formats.cuda.nvrtc import has_kernels
    from qerl.formats.nvfp4 import decode

    if out.dtype == torch.bfloat16 and has_kernels(out.device):
        return decode.decode_(out, weight, row_start)
    return dequantize_(out, weight, row_start, scaled=False)


def dequantize_(out: torch.Tensor, weight: KernelWeight, row_start: int = 0, scaled: bool = True) -> torch.Tensor:
    """Write the rows of `weight` from row_start on into a contiguous `out` (rows, in_features), 16- or 32-bit float.

    With `scaled`, they are bit-exact with `kernel_layout.dequantize`. Otherwise they lack the factor `weight.alpha` and
    are exact in bfloat16, since a code has 2 significant bits and a block scale 4.
    """
    rows, columns = out.shape
    if columns != weight.in_features or not out.is_contiguous() or row_start + rows > weight.out_features:
        raise ValueError(f"work buffer {tuple(out.shape)} at row {row_start} does not fit {weight}")
    if weight.layout is QERL:
        return dequantize_by_twin_(out, weight, row_start, scaled)
    tiles = triton.cdiv(row_start % TILE_ROWS + rows, TILE_ROWS)
    _dequantize_kernel[(triton.cdiv(columns // BLOCK, BLOCKS_PER_PROGRAM), tiles)](
        weight.words,
        weight.scales.view(torch.uint8),
        out,
        row_start,
        rows,
        columns,
        weight.scales.shape[1],
        1.0 / weight.scale_factor,
        float(weight.global_scale),
        TRANSPOSED=weight.layout.transposed,
        MARLIN=weight.layout.marlin_scales,
        SCALED=scaled,
        BLOCKS=BLOCKS_PER_PROGRAM,
        EXPERTS=False,
        num_warps=4,
    )
    return out


def dequantize_experts_(out: torch.Tensor, experts: KernelExperts) -> torch.Tensor:
    """Write all experts of a layer into a contiguous `out` (experts, out, in), with the bits of `dequantize_`."""
    count, rows, columns = out.shape
    shape = (experts.experts, experts.out_features, experts.in_features)
    if out.shape != shape or not out.is_contiguous() or not experts.words.is_contiguous():
        raise ValueError(f"work buffer {tuple(out.shape)} does not fit experts of {shape}")
    _dequantize_kernel[(triton.cdiv(columns // BLOCK, BLOCKS_PER_PROGRAM), triton.cdiv(rows, TILE_ROWS), count)](
        experts.words,
        experts.scales.view(torch.uint8),
        out,
        0,
        rows,
        columns,
        experts.scales.shape[2],
        1.0 / experts.scale_factor,
        experts.global_scale,
        TRANSPOSED=False,
        MARLIN=True,
        SCALED=True,
        BLOCKS=BLOCKS_PER_PROGRAM,
        EXPERTS=True,
        num_warps=4,
    )
    return out
