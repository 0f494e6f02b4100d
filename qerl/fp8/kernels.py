"""Decode FP8 weights on a card, in Triton: the fast twin of `reference.dequantize_unchecked`, with the same bits.

It reads codes as bytes and so runs on cards without FP8 too. It needs triton, so it is imported only for a card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qerl.fp8.layout import BLOCK

ROWS = 32  # that a program decodes, of one block's columns


@triton.jit
def _decode_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    codes_stride,
    scale_stride,
    out_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None].to(tl.int64)
    code = tl.load(codes_ptr + places * codes_stride + column[None, :], mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + (tl.program_id(1) * ROWS // BLOCK).to(tl.int64) * scale_stride + tl.program_id(0))
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal) * scale
    # The sign is set as a bit, because Triton's -x is 0 - x, which would turn -0.0 into +0.0.
    value = (magnitude.to(tl.int32, bitcast=True) | ((code & 128) << 24)).to(tl.float32, bitcast=True)
    tl.store(out_ptr + places * out_stride + column[None, :], value.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out, in) in `dtype` of codes (out, in) and float32 scales; rows of both may be part of more."""
    rows, columns = codes.shape
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, ROWS))
    strides = codes.stride(0), scale.stride(0), out.stride(0)
    _decode_kernel[grid](codes.view(torch.uint8), scale, out, rows, columns, *strides, ROWS=ROWS, BLOCK=BLOCK)
    return out
