"""The adapter's product beside a base product that another kernel made: two launches, added in place.

hidden = x A^T (`shrink`), out += hidden B^T (`expand_`); B is block-diagonal over the parts of a fused linear, and only
its blocks are read. Twin: two matrix products in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

RANK_STEP = 16  # ranks of a part are padded to a multiple of this


@triton.jit
def _expand_kernel(
    out_ptr,
    hidden_ptr,
    b_ptr,
    tokens,
    rows,
    ranks,
    part_rank,
    end_0,
    end_1,
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
    tl.store(place, (base + total).to(out_ptr.dtype.element_ty), mask=mask)


def expand_(out: torch.Tensor, hidden: torch.Tensor, lora_b: torch.Tensor, part_rows: Sequence[int]) -> torch.Tensor:
    """out (tokens, rows) += hidden (tokens, ranks) B^T, B (rows, ranks) block-diagonal over at most three parts.

    `part_rows` are the parts' rows; each has the same number of ranks, a multiple of RANK_STEP.
    """
    tokens, rows = out.shape
    ranks = hidden.shape[1]
    ends = [sum(part_rows[: index + 1]) for index in range(len(part_rows))]
    size = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    _expand_kernel[(triton.cdiv(rows, 128), triton.cdiv(tokens, size))](
        out,
        hidden,
        lora_b,
        tokens,
        rows,
        ranks,
        ranks // len(part_rows),
        ends[0],
        ends[1] if len(ends) > 1 else rows,
        TOKENS=size,
        ROWS=128,
        STEP=RANK_STEP,
        num_warps=4,
    )
    return out
