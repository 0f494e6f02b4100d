"""x W^T for few tokens that are rounded to FP8, in Triton: one pass over the codes by all processors of the card.

vLLM's CUTLASS kernel computes 128 rows of a weight at a time, so that a weight of 3584 rows keeps 28 of a Hopper's 132
processors busy. Here a program takes fewer rows and a part of the columns, and leaves a sum in float32; a second kernel
adds those of all parts, always in the same order. Codes are multiplied as float16, which holds them, and summed in
float32.

On an H200 it gave its twin's sums on 2026-11-23. Whether it is faster has not been measured there, so no engine takes
it but that of scripts/bench/bench_rollout.py --few-tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qerl.fp8.layout import BLOCK
from qerl.fp8.reference import FP8Tensor

MOST_TOKENS = 16
ROWS = 64  # of the weight that a program takes
PROGRAMS = 264  # at least so many, two for each processor
SUMS = 1024  # that a program adds


@triton.jit
def _sums_kernel(
    x_ptr,
    x_scale_ptr,
    codes_ptr,
    scale_ptr,
    sums_ptr,
    tokens,
    rows,
    blocks,
    x_stride,
    x_scale_stride,
    codes_stride,
    scale_stride,
    PER_PART: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, row, inner = tl.arange(0, TOKENS), tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    x_places = x_ptr + token[:, None] * x_stride + inner[None, :]
    code_places = codes_ptr + row[:, None].to(tl.int64) * codes_stride + inner[None, :]
    x_scales = x_scale_ptr + token * x_scale_stride
    scales = scale_ptr + (tl.program_id(0) * ROWS // BLOCK) * scale_stride
    total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for step in range(PER_PART):
        block = tl.program_id(1) * PER_PART + step
        given = tl.where(block < blocks, tokens, 0)  # behind the last block no token is read, which adds zeros
        block = tl.minimum(block, blocks - 1)
        x = tl.load(x_places + block * BLOCK, mask=(token < given)[:, None], other=0)
        codes = tl.load(code_places + block * BLOCK, mask=(row < rows)[:, None], other=0)
        scale = tl.load(x_scales + block, mask=token < given, other=0) * tl.load(scales + block)
        left = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        right = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        total += tl.dot(left, tl.trans(right)) * scale[:, None]
    place = (tl.program_id(1) * tokens + token[:, None]) * rows + row[None, :]
    tl.store(sums_ptr + place, total, mask=(token < tokens)[:, None] & (row < rows)[None, :])


@triton.jit
def _add_kernel(sums_ptr, out_ptr, size, PARTS: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for part in range(PARTS):
        total += tl.load(sums_ptr + part * size + place, mask=place < size, other=0)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=place < size)


def product(x: FP8Tensor, weight: FP8Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x W^T (T, out) in `dtype`, for x (T, in) of at most 16 tokens as `reference.quantize_input` rounds it.

    128 divides the columns. Rows of all four tensors may be part of more, and scales have neighbours for columns.
    """
    tokens, (rows, columns) = len(x.codes), weight.codes.shape
    blocks, programs = columns // BLOCK, triton.cdiv(rows, ROWS)
    per_part = triton.cdiv(blocks, min(blocks, triton.cdiv(PROGRAMS, programs)))
    parts = triton.cdiv(blocks, per_part)
    sums = torch.empty(parts, tokens, rows, dtype=torch.float32, device=x.codes.device)
    out = torch.empty(tokens, rows, dtype=dtype, device=x.codes.device)
    tensors = x.codes.view(torch.uint8), x.scale, weight.codes.view(torch.uint8), weight.scale
    strides = (tensor.stride(0) for tensor in tensors)
    kinds = {"PER_PART": per_part, "TOKENS": MOST_TOKENS, "ROWS": ROWS, "BLOCK": BLOCK}
    _sums_kernel[programs, parts](*tensors, sums, tokens, rows, blocks, *strides, **kinds, num_stages=4)
    _add_kernel[(triton.cdiv(out.numel(), SUMS),)](sums, out, out.numel(), PARTS=parts, SIZE=SUMS)
    return out
