"""Triton kernels for NVFP4: weights decoded or turned, activations rounded, and an adapter's second product.

Each is the fast twin of a function in plain torch, to the same bits: decoding of `kernel_layout.py`, `round_by_kernel`
of `activations.round_by_twin`, and `turn` of `decode.reference_turned`. Our own layout is decoded by `decode.py`; what
its CUDA kernel cannot write (scaled values, other dtypes, other cards) goes through plain torch, a few rows at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from qerl.formats.fp8.kernels import ceil_pow2, e4m3_code, has_e4m3
from qerl.formats.fp8.reference import E4M3, LEAST_INPUT
from qerl.formats.nvfp4.activations import ROW_EXPONENT, SMALLEST_EXPONENT
from qerl.formats.nvfp4.decode import dequantize_by_twin_
from qerl.formats.nvfp4.kernel_layout import QERL, TILE_ROWS, KernelWeight
from qerl.formats.nvfp4.layout import BLOCK, CODE_MAX, SCALE_MAX
from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.reference import ZERO_SCALE
from qerl.formats.nvfp4.slab_layout import ROWS, UNIT
from qerl.formats.nvfp4.ways import RANK_STEP

if TYPE_CHECKING:
    from qerl.formats.nvfp4.kernel_layout import KernelExperts


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
    """With EXPERTS, the third axis of the grid is the expert, and `global_scale` points to their scales."""
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
    """`dequantize_` with scaled=False, by the faster CUDA kernel for bfloat16 on cards that run it.

    Other cards than Hopper take it for our own layout alone, which has no other kernel.
    """
    from qerl.formats.cuda.nvrtc import has_kernels, has_portable_kernels
    from qerl.formats.nvfp4 import decode

    runs = has_portable_kernels if weight.layout is QERL else has_kernels
    if out.dtype == torch.bfloat16 and runs(out.device):
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


@triton.jit(do_not_specialize=["tokens"])  # their number changes during a rollout, which must not recompile
def _expand_kernel(
    out_ptr,
    hidden_ptr,
    b_ptr,
    bias_ptr,
    tokens,
    rows,
    ranks,
    part_rank,
    end_0,
    end_1,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = first_row + tl.arange(0, ROWS)
    last_row = tl.minimum(first_row + ROWS, rows) - 1
    first = (first_row >= end_0).to(tl.int32) + (first_row >= end_1).to(tl.int32)
    last = (last_row >= end_0).to(tl.int32) + (last_row >= end_1).to(tl.int32)
    inside_token, inside_row = (token < tokens)[:, None], (row < rows)[:, None]
    step = tl.arange(0, STEP)
    total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for start in range(first * part_rank, (last + 1) * part_rank, STEP):
        hidden = tl.load(hidden_ptr + token[:, None] * ranks + start + step[None, :], mask=inside_token, other=0.0)
        b = tl.load(b_ptr + row[:, None].to(tl.int64) * ranks + start + step[None, :], mask=inside_row, other=0.0)
        total = tl.dot(hidden, tl.trans(b), total)
    place = out_ptr + token[:, None].to(tl.int64) * rows + row[None, :]
    mask = inside_token & (row < rows)[None, :]
    base = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        base += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    tl.store(place, (base + total).to(out_ptr.dtype.element_ty), mask=mask)


def expand_(
    out: torch.Tensor, hidden: torch.Tensor, adapter: Adapter, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """out (tokens, rows) += hidden (tokens, ranks) B^T in place, and += bias (rows,) if there is one.

    Only the nonzero blocks of B are read. Adding the bias on the way spares a kernel of its own.
    """
    tokens, rows = out.shape
    ranks = hidden.shape[1]
    size = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    _expand_kernel[(triton.cdiv(rows, 128), triton.cdiv(tokens, size))](
        out,
        hidden,
        adapter.b,
        hidden if bias is None else bias,
        tokens,
        rows,
        ranks,
        adapter.part_rank,
        *adapter.part_ends,
        BIAS=bias is not None,
        TOKENS=size,
        ROWS=128,
        STEP=RANK_STEP,
        num_warps=4,
    )
    return out


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
    """See the twin. A launch can be captured in a CUDA graph.

    The limit is the memory's speed: 2 bytes read and 2 written per bfloat16 value. With dynamic scales a row is read
    once for its amax, and again, from the cache, to be rounded. Few rows, as in a decode step, are split over several
    programs, each of which takes the amax of the whole row.
    """
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
    """The weight as transposed FP8 codes; see `decode.reference_turned`.

    A program turns one unit of the layout (`slab_layout.py`), 256 rows x 64 columns. A word has eight codes; a shift
    brings the code of one place to bits 15 and 6 to 8 of its half word, and so to the sign and the lowest exponent bits
    of a float32, subnormals included, which is its value times 2^-126.
    """
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
