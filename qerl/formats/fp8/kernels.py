"""Decode and pack FP8 weights on a card, round inputs and whole matrices and turn codes, in Triton: twins of
`reference.dequantize_unchecked`, `quantize_unchecked` and `quantize_input` and of `training.round_matrix`, with the
same bits.

They treat codes as bytes and so run on cards without FP8 too. They need triton, so they are imported only for a card.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qerl.formats.fp8.layout import BLOCK, CODE_MAX
from qerl.formats.fp8.reference import E4M3, LEAST_INPUT, LEAST_WEIGHT, FP8Tensor, ScaleKind

HALF = BLOCK // 2  # the side of a tile that is written both ways, which would else leave room for 8 warps alone
TILES = 16  # of BLOCK columns, that a program looks at for the largest magnitude
ROWS = 32  # that a program decodes, of one block's columns
FEW_TOKENS = 1024  # up to which a program rounds less, so that all processors of a card have work
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
def ceil_pow2(x):
    """Each positive float32 rounded up to a power of two."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(bits):
    """The code of each float32 with these bits, which is at most 448; NaN gives no code of its own."""
    size = bits & 0x7FFFFFFF
    # A float32 has 20 bits of mantissa more than a code, which round to even, and another bias of the exponent.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Beside 2^14 float32 has steps of 2^-9, as codes below 2^-6 have.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 128)


@triton.jit
def e5m2_code(bits):
    """As `e4m3_code`, for at most 57344: 21 bits more, and steps of 2^-16 below 2^-14, as float32 has beside 128."""
    size = bits & 0x7FFFFFFF
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - (112 << 2)
    small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) & 7
    return tl.where(size < 0x38800000, small, normal) | ((bits >> 24) & 128)


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
        scale = ceil_pow2(scale)
    tl.store(scale_ptr + tl.program_id(1).to(tl.int64) * scale_stride + tl.program_id(0), scale)
    # The sign is taken off by the bits of the product, so that no compiler makes one operation of it and a sum.
    code = e4m3_code((value * tl.div_rn(1.0, scale)).to(tl.int32, bitcast=True))
    tl.store(codes_ptr + places * codes_stride + column[None, :], code.to(tl.uint8), mask=inside)


def pack_(matrix: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, scales: ScaleKind) -> torch.Tensor:
    """Overwrite codes (out, in) and float32 scales from `matrix` (out, in), and return int32 (1,): how many of
    its elements are inf or NaN. Rows of all three may be part of more."""
    rows, columns = matrix.shape
    faults = torch.zeros(1, dtype=torch.int32, device=matrix.device)
    strides = matrix.stride(0), codes.stride(0), scale.stride(0)
    numbers = rows, columns, *strides, LEAST_WEIGHT, RECIPROCAL
    grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK))
    into = codes.view(torch.uint8), scale, faults
    _pack_kernel[grid](matrix, *into, *numbers, POW2=scales == "pow2", BLOCK=BLOCK, num_warps=8)
    return faults


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _input_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    rows,
    columns,
    x_stride,
    scale_stride,
    least,
    POW2: tl.constexpr,
    BY_CARD: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places, inside = row[:, None].to(tl.int64), (row < rows)[:, None]
    value = tl.load(x_ptr + places * x_stride + column[None, :], mask=inside, other=0).to(tl.float32)
    magnitude = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    amax = tl.maximum(tl.max(magnitude, axis=1), least)
    scale = tl.div_rn(amax, tl.full((ROWS,), LARGEST, tl.float32))
    if POW2:
        scale = ceil_pow2(tl.maximum(scale, least))
        scaled = value * tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale)[:, None]
    else:
        scaled = tl.div_rn(value, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)))
    tl.store(scale_ptr + tl.program_id(1).to(tl.int64) * scale_stride + row, scale, mask=row < rows)
    if BY_CARD:
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = e4m3_code(scaled.to(tl.int32, bitcast=True)).to(tl.uint8)
    tl.store(codes_ptr + places * columns + column[None, :], code, mask=inside)


def quantize_input(x: torch.Tensor, scales: ScaleKind, aligned: int = 1) -> FP8Tensor:
    """`reference.quantize_input` of x (T, in) whose columns are whole groups: codes (T, in) and scales (T, in / 128).

    Scales have neighbours for tokens, as kernels read them; a group's begin at a multiple of `aligned`. vLLM's kernel
    reaches a quarter of an H200's bandwidth.
    """
    tokens, columns = x.shape
    groups, stride = columns // BLOCK, triton.cdiv(tokens, aligned) * aligned
    codes = torch.empty(tokens, columns, dtype=E4M3, device=x.device)
    scale = torch.empty_strided((tokens, groups), (1, stride), dtype=torch.float32, device=x.device)
    rows, warps = (4, 1) if tokens <= FEW_TOKENS else (32, 4)
    kinds = {"POW2": scales == "pow2", "BY_CARD": has_e4m3(x.device), "LARGEST": CODE_MAX, "BLOCK": BLOCK}
    numbers = tokens, columns, x.stride(0), stride, LEAST_INPUT
    grid = (triton.cdiv(tokens, rows), groups)
    _input_kernel[grid](x, codes.view(torch.uint8), scale, *numbers, ROWS=rows, **kinds, num_warps=warps)
    return FP8Tensor(codes, scale)


@cache
def has_e4m3(device: torch.device) -> bool:
    """Whether the card turns float32 into e4m3 by an instruction, as those from Ada on do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit(do_not_specialize=["rows"])  # a micro-batch has any number of tokens
def _largest_kernel(x_ptr, largest_ptr, rows, columns, x_stride, TILES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places, first = row[:, None].to(tl.int64) * x_stride, tl.program_id(1) * TILES * BLOCK
    most = tl.zeros((BLOCK, BLOCK), tl.int32)
    for tile in range(TILES):
        column = first + tile * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(x_ptr + places + column[None, :], mask=inside, other=0).to(tl.float32)
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(largest_ptr, tl.max(tl.max(most, axis=1), axis=0))


# A micro-batch has any number of tokens, and the largest magnitude may lie anywhere.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["largest_ptr"])
def _round_kernel(
    x_ptr,
    largest_ptr,
    scale_ptr,
    codes_ptr,
    turned_ptr,
    rows,
    columns,
    x_stride,
    turned_stride,
    least,
    LARGEST: tl.constexpr,
    FIVE: tl.constexpr,
    PLAIN: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The bits of magnitudes are in the order of their values, with infinity and NaN above all others.
    found = tl.load(largest_ptr)
    scale = ceil_pow2(tl.div_rn(tl.maximum(found.to(tl.float32, bitcast=True), least), LARGEST))
    scale = tl.where(found < 0x7F800000, scale.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.float32, bitcast=True)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None].to(tl.int64) * x_stride + column[None, :]
    value = tl.load(x_ptr + places, mask=inside, other=0).to(tl.float32)
    bits = (value * tl.div_rn(1.0, scale)).to(tl.int32, bitcast=True)
    code = e5m2_code(bits) if FIVE else e4m3_code(bits)
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 127, code).to(tl.uint8)
    if PLAIN:
        tl.store(codes_ptr + row[:, None].to(tl.int64) * columns + column[None, :], code, mask=inside)
    if TURNED:  # what lies beyond the rows has codes of 0
        out = column[:, None].to(tl.int64) * turned_stride + row[None, :]
        tl.store(turned_ptr + out, tl.trans(code), mask=(column < columns)[:, None] & (row < turned_stride)[None, :])


class Rounded(NamedTuple):
    """Codes of a matrix (rows, columns) and of its transpose (columns, rows), and the float32 scale () of both."""

    codes: torch.Tensor | None
    turned: torch.Tensor | None
    scale: torch.Tensor


def round_matrix(
    x: torch.Tensor, dtype: torch.dtype, plain: bool = True, turned: int = 0, largest: torch.Tensor | None = None
) -> Rounded:
    """x (rows, columns) in `dtype`, e4m3 or e5m2, under the least power of two with which nothing saturates.

    It has the codes if `plain`, and the transpose's unless `turned` is 0: their rows are filled up by zeros to a
    multiple of it. The scale is NaN if an element is not finite, and so are all codes. Neighbours of x in a row are
    neighbours in memory. One launch finds the largest magnitude and one rounds, where torch needs about 17; for
    matrices of few tokens that is most of the time. Where the largest magnitude is known, its bits as a float32 are
    `largest`, int32 ().
    """
    rows, columns = x.shape
    if largest is None:
        largest = torch.zeros((), dtype=torch.int32, device=x.device)
        grid = (triton.cdiv(rows, BLOCK), triton.cdiv(columns, TILES * BLOCK))
        _largest_kernel[grid](x, largest, rows, columns, x.stride(0), TILES=TILES, BLOCK=BLOCK, num_warps=8)
    stride = triton.cdiv(rows, turned) * turned if turned else 0
    byte = {"dtype": torch.uint8, "device": x.device}
    codes = torch.empty(rows, columns, **byte) if plain else None
    other = torch.empty(columns, stride, **byte) if turned else None
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    kinds = {"LARGEST": torch.finfo(dtype).max, "FIVE": dtype == torch.float8_e5m2, "PLAIN": plain}
    side = HALF if plain and turned else BLOCK
    grid = (triton.cdiv(max(rows, stride), side), triton.cdiv(columns, side))
    into = largest, scale, scale if codes is None else codes, scale if other is None else other
    numbers = rows, columns, x.stride(0), stride, LEAST_INPUT
    _round_kernel[grid](x, *into, *numbers, **kinds, TURNED=turned > 0, BLOCK=side, num_warps=4 if side == HALF else 8)
    return Rounded(*(None if one is None else one.view(dtype) for one in (codes, other)), scale)


@triton.jit
def _turn_kernel(codes_ptr, out_ptr, rows, columns, codes_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    code = tl.load(codes_ptr + row[:, None].to(tl.int64) * codes_stride + column[None, :], mask=inside, other=0)
    out = column[:, None].to(tl.int64) * rows + row[None, :]
    tl.store(out_ptr + out, tl.trans(code), mask=(column < columns)[:, None] & (row < rows)[None, :])


def turn(codes: torch.Tensor) -> torch.Tensor:
    """The transpose (columns, rows) of 8-bit codes (rows, columns), copied. torch copies single bytes slowly."""
    rows, columns = codes.shape
    out = torch.empty(columns, rows, dtype=torch.uint8, device=codes.device)
    grid = (triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK))
    _turn_kernel[grid](codes.view(torch.uint8), out, rows, columns, codes.stride(0), BLOCK=BLOCK, num_warps=8)
    return out.view(codes.dtype)
