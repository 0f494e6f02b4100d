"""Triton kernels that turn an NVFP4 weight into transposed FP8 codes. Twin: `decode.reference_turned`.

A program turns one unit of the layout (`slab_layout.py`), 256 rows x 64 columns. A word has eight codes; a shift brings
the code of one place to bits 15 and 6 to 8 of its half word, and so to the sign and the lowest exponent bits of a
float32, subnormals included, which is its value times 2^-126.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qerl.formats.fp8.kernels import ceil_pow2, e4m3_code, has_e4m3
from qerl.formats.fp8.reference import E4M3, LEAST_INPUT
from qerl.formats.nvfp4.kernel_layout import KernelWeight
from qerl.formats.nvfp4.layout import CODE_MAX
from qerl.formats.nvfp4.slab_layout import ROWS, UNIT

PIECE = 16384  # block scales that a program looks at for the largest


@triton.jit
def _largest_scale_kernel(scales_ptr, largest_ptr, count, PIECE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    stored = tl.load(scales_ptr + at, mask=at < count, other=0).to(tl.int32)
    tl.atomic_max(largest_ptr, tl.max(stored, axis=0))


@triton.jit
def _scale_of(stored):
    """A block scale from its byte: five bits of exponent with a bias of 10, and three of mantissa; 0 is zero."""
    return tl.where(stored == 0, 0, (stored << 20) + (117 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _code(half_words, factor, BY_CARD: tl.constexpr):
    """The e4m3 byte of the e2m1 code at the top of each word, times `factor` * 2^-66."""
    value = (half_words & 0x81C00000).to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)
    value = value * 1152921504606846976.0 * factor  # 2^60
    if BY_CARD:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return e4m3_code(value.to(tl.int32, bitcast=True)).to(tl.uint8)


@triton.jit
def _turn_kernel(
    words_ptr,
    scales_ptr,
    largest_ptr,
    scale_ptr,
    out_ptr,
    row_start,
    rows,
    columns,
    units,
    least,
    alpha,
    CODE_MAX: tl.constexpr,
    LARGEST: tl.constexpr,
    BY_CARD: tl.constexpr,
):
    unit, block = tl.program_id(0), row_start // 256 + tl.program_id(1)
    scale = ceil_pow2(tl.div_rn(tl.maximum(_scale_of(tl.load(largest_ptr)) * CODE_MAX, least), LARGEST))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale * alpha)
    first = block.to(tl.int64) * units + unit
    index = tl.arange(0, 2048)  # of words: 16 slabs x 8 rows x 4 pairs of columns x 4 blocks of 16 columns
    at = first * 1024 + index // 16 * 8 + index % 4 // 2 * 4 + index % 2
    inverse = tl.div_rn(1.0, scale) * 73786976294838206464.0  # 2^66
    upper_rows = _scale_of(tl.load(scales_ptr + at).to(tl.int32)) * inverse
    lower_rows = _scale_of(tl.load(scales_ptr + at + 2).to(tl.int32)) * inverse
    word = tl.load(words_ptr + first * 2048 + index).to(tl.uint32, bitcast=True)
    turned = (word << 10) | (word >> 22)
    last = ((word << 4) & 0x81808180) | ((word >> 4) & 0x00400040)
    # Each join adds a dimension of two at the end: first which eight of a slab's rows, then which eight of a block's
    # columns, and at last which one of a pair of columns.
    even = tl.join(
        tl.join(_code(word << 16, upper_rows, BY_CARD), _code(turned << 16, lower_rows, BY_CARD)),
        tl.join(_code(word << 22, upper_rows, BY_CARD), _code(last << 16, lower_rows, BY_CARD)),
    )
    odd = tl.join(
        tl.join(_code(word, upper_rows, BY_CARD), _code(turned, lower_rows, BY_CARD)),
        tl.join(_code(word << 6, upper_rows, BY_CARD), _code(last, lower_rows, BY_CARD)),
    )
    codes = tl.join(even, odd).reshape(16, 8, 4, 4, 2, 2, 2)
    tile = tl.permute(codes, (3, 5, 2, 6, 0, 4, 1)).reshape(64, 256)
    column, row = unit * 64 + tl.arange(0, 64), block * 256 + tl.arange(0, 256) - row_start
    inside = (column < columns)[:, None] & ((row >= 0) & (row < rows))[None, :]
    tl.store(out_ptr + column[:, None].to(tl.int64) * rows + row[None, :], tile, mask=inside)


def turn(weight: KernelWeight, row_start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `decode.reference_turned`."""
    columns, device = weight.in_features, weight.words.device
    largest = torch.zeros((), dtype=torch.int32, device=device)
    scales = weight.scales.view(torch.uint8)
    count = scales.numel()
    _largest_scale_kernel[(triton.cdiv(count, PIECE),)](scales, largest, count, PIECE=PIECE, num_warps=8)
    scale = torch.empty((), dtype=torch.float32, device=device)
    out = torch.empty(columns, rows, dtype=torch.uint8, device=device)
    units = triton.cdiv(columns, UNIT)
    grid = (units, triton.cdiv(row_start + rows, ROWS) - row_start // ROWS)
    numbers = row_start, rows, columns, units, LEAST_INPUT, weight.alpha
    kinds = {"CODE_MAX": CODE_MAX, "LARGEST": torch.finfo(E4M3).max, "BY_CARD": has_e4m3(device)}
    _turn_kernel[grid](weight.words, scales, largest, scale, out, *numbers, **kinds, num_warps=8)
    return out.view(E4M3), scale
