"""Decode and pack FP8 weights on a card, in Triton: twins of `reference.dequantize_unchecked` and of
`reference.quantize_unchecked`, with the same bits.

They treat codes as bytes and so run on cards without FP8 too. They need triton, so they are imported only for a card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qerl.fp8.layout import BLOCK, CODE_MAX
from qerl.fp8.reference import LEAST_WEIGHT, ScaleKind

ROWS = 32  # that a program decodes, of one block's columns
RECIPROCAL = float(torch.tensor(CODE_MAX).reciprocal())  # in float32, as the oracle has it


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


@triton.jit
def _pack_kernel(
    matrix_ptr,
    codes_ptr,
    scale_ptr,
    faults_ptr,
    rows,
    columns,
    matrix_stride,
    codes_stride,
    scale_stride,
    least,
    reciprocal,
    POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None].to(tl.int64)
    value = tl.load(matrix_ptr + places * matrix_stride + column[None, :], mask=inside, other=0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    faults = tl.sum(tl.sum(((bits & 0x7F800000) == 0x7F800000).to(tl.int32), axis=1), axis=0)
    tl.atomic_add(faults_ptr, faults, mask=faults > 0)
    scale = tl.maximum(tl.max(tl.max(magnitude, axis=1), axis=0), least) * reciprocal
    if POW2:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + tl.program_id(1).to(tl.int64) * scale_stride + tl.program_id(0), scale)
    # The sign is taken off by the bits of the product, so that no compiler makes one operation of it and the sum below.
    scaled = (value * tl.div_rn(1.0, scale)).to(tl.int32, bitcast=True)
    size = scaled & 0x7FFFFFFF
    # A float32 has 20 bits of mantissa more than a code, which round to even, and another bias of the exponent.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Beside 2^14 float32 has steps of 2^-9, those of codes below 2^-6.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < 0x3C800000, small, normal) | ((scaled >> 24) & 128)
    tl.store(codes_ptr + places * codes_stride + column[None, :], code.to(tl.uint8), mask=inside)


def pack_(matrix: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scales: ScaleKind) -> torch.Tensor:
    """Overwrite codes (out, in) and float32 scales by those of `matrix` (out, in), and return int32 (1,): how many of
    its elements are inf or NaN. Rows of all three may be part of more."""
    rows, columns = matrix.shape
    faults = torch.zeros(1, dtype=torch.int32, device=matrix.device)
    strides = matrix.stride(0), codes.stride(0), scale.stride(0)
    numbers = rows, columns, *strides, LEAST_WEIGHT, RECIPROCAL
    grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK))
    into = codes.view(torch.uint8), scale, faults
    _pack_kernel[grid](matrix, *into, *numbers, POW2=scales == "pow2", BLOCK=BLOCK, num_warps=8)
    return faults
