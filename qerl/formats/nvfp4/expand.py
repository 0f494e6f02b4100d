"""The second half of an adapter's product in Triton: out += hidden B^T, reading only the nonzero blocks of B.

A bias of the base is added on the way, which spares a kernel of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.ranks import RANK_STEP


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
    """out (tokens, rows) += hidden (tokens, ranks) B^T in place, and += bias (rows,) if there is one."""
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
