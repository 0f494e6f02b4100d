"""The adapter on experts in Triton, between the two base products; `expert_lora.py` has the twins.

Rows are pairs of a token and one of its experts, in the order of tokens. `Routing` says in which blocks of pairs, each
of one expert, the base products work, and the kernels use the same blocks. Two of the launches take the place of ones
that a layer needs without an adapter, too: the activation, and the sum over a token's experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

COLUMNS = 64  # of the output, per program
STEP = 128  # columns of a sum that are read at once
TOKENS = 16  # per program of the sum over experts


@dataclass(frozen=True)
class Routing:
    """What vLLM's `moe_align_block_size` returns: `pairs` (numbers of pairs, padded per expert to whole blocks),
    `experts` (the expert of each block) and `padded` (how many of `pairs` count, a tensor of one number).

    Where no pair belongs, `pairs` has numbers from `count` on. `chosen` is how many experts a token has.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    padded: torch.Tensor
    block: int
    count: int
    chosen: int

    @property
    def grid(self) -> int:
        """The most blocks there can be."""
        return triton.cdiv(len(self.pairs), self.block)

    @property
    def rows(self) -> int:
        """The rows of a block's tile: Triton multiplies at least 16, and powers of two."""
        return max(16, triton.next_power_of_2(self.block))


@triton.jit
def _block(pairs_ptr, experts_ptr, count, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The pairs of this program's block, which of them exist, and their expert."""
    block = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    pair = tl.load(pairs_ptr + block * BLOCK + lane, mask=lane < BLOCK, other=count)
    return pair, pair < count, tl.load(experts_ptr + block).to(tl.int64)


@triton.jit(do_not_specialize=["count"])  # it changes during a rollout, which must not recompile
def _shrink_kernel(
    out_ptr,
    x_ptr,
    a_ptr,
    pairs_ptr,
    experts_ptr,
    padded_ptr,
    count,
    columns,
    SHARES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    if tl.program_id(0) * BLOCK >= tl.load(padded_ptr):
        return
    pair, inside, expert = _block(pairs_ptr, experts_ptr, count, BLOCK, ROWS)
    row = (pair // SHARES).to(tl.int64)
    rank, step = tl.arange(0, RANK), tl.arange(0, STEP)
    a_ptr += expert * RANK * columns
    total = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for start in range(0, columns, STEP):
        column = start + step
        within = (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside[:, None] & within, other=0.0)
        a = tl.load(a_ptr + rank[:, None] * columns + column[None, :], mask=within, other=0.0)
        total = tl.dot(x, tl.trans(a), total)
    place = out_ptr + pair.to(tl.int64)[:, None] * RANK + rank[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["count"])
def _activate_kernel(
    out_ptr,
    inner_ptr,
    h_ptr,
    b_ptr,
    pairs_ptr,
    experts_ptr,
    padded_ptr,
    count,
    width,
    SHARES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if tl.program_id(0) * BLOCK >= tl.load(padded_ptr):
        return
    pair, inside, expert = _block(pairs_ptr, experts_ptr, count, BLOCK, ROWS)
    row, pair = (pair // SHARES).to(tl.int64), pair.to(tl.int64)
    rank, column = tl.arange(0, RANK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < width
    mask = inside[:, None] & within[None, :]
    h = tl.load(h_ptr + row[:, None] * RANK + rank[None, :], mask=inside[:, None], other=0.0)
    b_ptr += expert * 2 * width * RANK
    b_gate = tl.load(b_ptr + column[:, None] * RANK + rank[None, :], mask=within[:, None], other=0.0)
    b_up = tl.load(b_ptr + (width + column)[:, None] * RANK + rank[None, :], mask=within[:, None], other=0.0)
    place = inner_ptr + pair[:, None] * (2 * width) + column[None, :]
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
    gate = tl.dot(h, tl.trans(b_gate), gate).to(inner_ptr.dtype.element_ty).to(tl.float32)
    up = tl.dot(h, tl.trans(b_up), up).to(inner_ptr.dtype.element_ty).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + pair[:, None] * width + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _expand_kernel(
    y_ptr,
    h_ptr,
    b_ptr,
    weights_ptr,
    pairs_ptr,
    experts_ptr,
    padded_ptr,
    count,
    columns,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if tl.program_id(0) * BLOCK >= tl.load(padded_ptr):
        return
    pair, inside, expert = _block(pairs_ptr, experts_ptr, count, BLOCK, ROWS)
    pair = pair.to(tl.int64)
    rank, column = tl.arange(0, RANK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < columns
    mask = inside[:, None] & within[None, :]
    h = tl.load(h_ptr + pair[:, None] * RANK + rank[None, :], mask=inside[:, None], other=0.0)
    b_ptr += expert * columns * RANK
    b = tl.load(b_ptr + column[:, None] * RANK + rank[None, :], mask=within[:, None], other=0.0)
    weight = tl.load(weights_ptr + pair, mask=inside, other=0.0)
    place = y_ptr + pair[:, None] * columns + column[None, :]
    y = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    y += weight[:, None] * tl.dot(h, tl.trans(b))
    tl.store(place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _combine_kernel(
    out_ptr,
    y_ptr,
    h_ptr,
    b_ptr,
    weights_ptr,
    tokens,
    columns,
    CHOSEN: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    rank, column = tl.arange(0, RANK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, within = token < tokens, column < columns
    mask = inside[:, None] & within[None, :]
    hidden = tl.zeros((TOKENS, RANK), dtype=tl.float32)
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        weight = tl.load(weights_ptr + pair, mask=inside, other=0.0)
        h = tl.load(h_ptr + pair[:, None] * RANK + rank[None, :], mask=inside[:, None], other=0.0)
        hidden += weight[:, None] * h.to(tl.float32)
        total += tl.load(y_ptr + pair[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + column[:, None] * RANK + rank[None, :], mask=within[:, None], other=0.0)
    total = tl.dot(hidden.to(h_ptr.dtype.element_ty), tl.trans(b), total)
    tl.store(out_ptr + token[:, None] * columns + column[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


def shrink(x: torch.Tensor, a: torch.Tensor, routing: Routing) -> torch.Tensor:
    """See the twin."""
    rank, columns = a.shape[1:]
    out = x.new_empty(routing.count, rank)
    _shrink_kernel[(routing.grid,)](
        out, x, a, *_arguments(routing), columns, _shares(x, routing), rank, **_tile(routing), STEP=STEP
    )
    return out


def activate(inner: torch.Tensor, h: torch.Tensor, b: torch.Tensor, routing: Routing) -> torch.Tensor:
    """See the twin. Rows that belong to no expert are left as they were allocated."""
    width = inner.shape[1] // 2
    out = inner.new_empty(routing.count, width)
    _activate_kernel[(routing.grid, triton.cdiv(width, COLUMNS))](
        out,
        inner,
        h,
        b,
        *_arguments(routing),
        width,
        _shares(h, routing),
        b.shape[2],
        **_tile(routing),
        COLUMNS=COLUMNS,
    )
    return out


def expand_(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    columns = y.shape[1]
    _expand_kernel[(routing.grid, triton.cdiv(columns, COLUMNS))](
        y, h, b, weights, *_arguments(routing), columns, b.shape[2], **_tile(routing), COLUMNS=COLUMNS
    )
    return y


def combine(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    (tokens, chosen), columns = weights.shape, y.shape[1]
    out = y.new_empty(tokens, columns)
    _combine_kernel[(triton.cdiv(tokens, TOKENS), triton.cdiv(columns, COLUMNS))](
        out, y, h, b, weights, tokens, columns, chosen, b.shape[1], TOKENS=TOKENS, COLUMNS=COLUMNS
    )
    return out


def _arguments(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    return routing.pairs, routing.experts, routing.padded, routing.count


def _shares(rows: torch.Tensor, routing: Routing) -> int:
    """How many pairs share a row: those of a token, or one."""
    return 1 if len(rows) == routing.count else routing.chosen


def _tile(routing: Routing) -> dict[str, int]:
    return {"BLOCK": routing.block, "ROWS": routing.rows}
