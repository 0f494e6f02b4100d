"""Triton kernels: the adapter on experts, the draw of tokens, and what stands between a layer's products.

`twins.py` has their twins.

Rows of the adapter's kernels are pairs of a token and one of its experts, in the order of tokens. `Routing` says in
which blocks of pairs, each of one expert, the base products work, and the kernels use the same blocks. Two of the
launches take the place of ones that a layer needs without an adapter, too: the activation, and the sum over a token's
experts.

`draw` draws one token per row with its logprob. Each program of the first launch reads a block of logits and keeps
their maximum and their sum of exponentials; then one program per row draws a block, and a token of that block, so that
few logits need noise. `rows` is not specialized, because an odd number of sequences would recompile.

`add_norm`, `swiglu` and `rotate_` are one launch each; nothing is compiled for the sake of fusing them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qerl.engine.vllm.twins import BLOCK, QUARTER
from qerl.formats.cuda.nvrtc import early

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
    """How many pairs share a row: all pairs of a token, or one."""
    return 1 if len(rows) == routing.count else routing.chosen


def _tile(routing: Routing) -> dict[str, int]:
    return {"BLOCK": routing.block, "ROWS": routing.rows}


def draw(
    logits: torch.Tensor,
    request: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin. `logits` may have any floating dtype, and any stride between its rows. `out` is filled if given."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    partial = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)  # maximum, sum of exponentials
    if out is None:
        out = partial.new_empty(rows, dtype=torch.int64), partial.new_empty(rows)
    tokens, logprobs = out
    common = (logits, logits.stride(0), request, temperature)
    _block_kernel[(rows, blocks)](*common, partial, rows, vocabulary, BLOCK=BLOCK, num_warps=8)
    _row_kernel[(rows,)](
        *(*common, seeds, positions.contiguous(), partial, tokens, logprobs, rows, vocabulary, blocks),
        **{"WIDTH": triton.next_power_of_2(blocks), "QUARTER": QUARTER, "num_warps": 8},
    )
    return tokens, logprobs


@triton.jit
def _exponential(bits):
    """Standard exponential noise -log(1 - u) from 32 random bits; a series where 1 - u would round u away."""
    bits = bits.to(tl.int32, bitcast=True)
    u = tl.maximum(tl.where(bits < 0, -bits - 1, bits).to(tl.float32) * 4.6566127342e-10, 4.6566127342e-10)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def _scaled(logits_ptr, index, vocabulary, inverse):
    return tl.load(logits_ptr + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32) * inverse


@triton.jit
def _key(logits_ptr, index, vocabulary, inverse, largest, bits, greedy):
    z = _scaled(logits_ptr, index, vocabulary, inverse) - largest
    return tl.where(greedy, -z, _exponential(bits) / tl.exp(z))


@triton.jit
def _least(key, part, other, number):
    """The smaller of two keys, and in which part it is: in the earlier one, if both are equal."""
    return tl.where(other < key, other, key), tl.where(other < key, number, part)


@triton.jit(do_not_specialize=["rows"])
def _block_kernel(logits_ptr, stride, request_ptr, temperature_ptr, partial_ptr, rows, vocabulary, BLOCK: tl.constexpr):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperature_ptr + tl.load(request_ptr + row))
    inverse = tl.where(temperature == 0.0, 1.0, 1.0 / temperature)
    z = _scaled(logits_ptr + row * stride, block * BLOCK + tl.arange(0, BLOCK), vocabulary, inverse)
    maximum = tl.max(z)
    place = row * blocks + block
    tl.store(partial_ptr + place, maximum)
    tl.store(partial_ptr + rows * blocks + place, tl.sum(tl.exp(z - tl.where(maximum == float("-inf"), 0.0, maximum))))


@triton.jit(do_not_specialize=["rows"])
def _row_kernel(
    logits_ptr,
    stride,
    request_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    partial_ptr,
    tokens_ptr,
    logprobs_ptr,
    rows,
    vocabulary,
    blocks,
    WIDTH: tl.constexpr,
    QUARTER: tl.constexpr,
):
    """The largest of z + g is where E / exp(z) is least, with E = exp(-g): one logarithm per logit instead of two."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + row)
    temperature = tl.load(temperature_ptr + request)
    greedy = temperature == 0.0
    inverse = tl.where(greedy, 1.0, 1.0 / temperature)
    seed, seed_of_blocks, _, _ = tl.randint4x(tl.load(seeds_ptr + request), tl.load(positions_ptr + row))
    number = tl.arange(0, WIDTH)
    place, exists = row * blocks + number, number < blocks
    maxima = tl.load(partial_ptr + place, mask=exists, other=float("-inf"))
    totals = tl.load(partial_ptr + rows * blocks + place, mask=exists, other=0.0)
    maximum = tl.max(maxima)
    masses = tl.where(totals == 0, 0.0, totals * tl.exp(maxima - maximum))  # NaN stays
    key = tl.where(greedy, maximum - maxima, _exponential(tl.randint(seed_of_blocks, number)) / masses)
    block = tl.min(tl.where(key == tl.min(key), number, blocks - 1))
    largest = tl.max(tl.where(number == block, maxima, float("-inf")))
    lane = tl.arange(0, QUARTER)
    r0, r1, r2, r3 = tl.randint4x(seed, lane)
    logits_ptr += row * stride
    first = block * (4 * QUARTER)
    key, part = _key(logits_ptr, first + lane, vocabulary, inverse, largest, r0, greedy), tl.zeros_like(lane)
    other = _key(logits_ptr, first + QUARTER + lane, vocabulary, inverse, largest, r1, greedy)
    key, part = _least(key, part, other, 1)
    other = _key(logits_ptr, first + 2 * QUARTER + lane, vocabulary, inverse, largest, r2, greedy)
    key, part = _least(key, part, other, 2)
    other = _key(logits_ptr, first + 3 * QUARTER + lane, vocabulary, inverse, largest, r3, greedy)
    key, part = _least(key, part, other, 3)
    inside = tl.min(tl.where(key == tl.min(key), part * QUARTER + lane, 4 * QUARTER - 1))
    token = tl.minimum(first + inside, vocabulary - 1)
    logit = tl.load(logits_ptr + token).to(tl.float32) * inverse
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, logit - maximum - tl.log(tl.sum(masses)))


@triton.jit
def _add_norm_kernel(
    x_ptr,
    residual_ptr,
    gain_ptr,
    out_ptr,
    wide_ptr,
    columns,
    heads,
    stride,
    eps,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0)  # no launch of a step writes it
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + (row // heads) * stride + (row % heads) * columns + column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if ADDS:
        tl.store(wide_ptr + row * columns + column, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(out_ptr + row * columns + column, (x * scale * gain).to(out_ptr.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gain * wide / sqrt(mean(wide^2) + eps) in x's dtype, wide = x + residual in float32 or None without one).

    x is (tokens, columns), or (tokens, heads, columns) of which each head has a norm of its own; tokens may be strided.
    `residual` has x's shape, `gain` is float32 (columns,).
    """
    columns, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = None if residual is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    if x.shape[0]:
        _add_norm_kernel[(x.shape[0] * heads,)](
            x,
            x if residual is None else residual,
            gain,
            out,
            out if wide is None else wide,
            columns,
            heads,
            x.stride(0),
            eps,
            ADDS=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **early(x.device),
        )
    return out, wide


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, columns, EARLY: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    if EARLY:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(x_ptr + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (tokens, columns) for x (tokens, 2 columns), gate before up, contiguous; rounded once."""
    columns, width = x.shape[1] // 2, 2048
    out = x.new_empty(x.shape[0], columns)
    if x.shape[0]:
        grid = (x.shape[0], triton.cdiv(columns, width))
        _swiglu_kernel[grid](x, out, columns, WIDTH=width, num_warps=4, **early(x.device))
    return out


@triton.jit
def _rotate_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    angles_ptr,
    q_heads,
    k_heads,
    q_stride,
    k_stride,
    head_dim,
    half,
    EARLY: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    angle = tl.load(positions_ptr + token) * 2 * half + column
    cos = tl.load(angles_ptr + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles_ptr + angle + half, mask=column < half, other=0.0).to(tl.float32)[None, :]
    of_q = (head < q_heads)[:, None] & (column < half)[None, :]
    of_k = ((head >= q_heads) & (head < q_heads + k_heads))[:, None] & (column < half)[None, :]
    q_at = q_ptr + token * q_stride + head[:, None] * head_dim + column[None, :]
    k_at = k_ptr + token * k_stride + (head - q_heads)[:, None] * head_dim + column[None, :]
    first = tl.load(q_at, mask=of_q, other=0.0).to(tl.float32) + tl.load(k_at, mask=of_k, other=0.0).to(tl.float32)
    second = tl.load(q_at + half, mask=of_q, other=0.0).to(tl.float32)
    second += tl.load(k_at + half, mask=of_k, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    low = (first * cos - second * sin).to(q_ptr.dtype.element_ty)
    high = (second * cos + first * sin).to(q_ptr.dtype.element_ty)
    tl.store(q_at, low, mask=of_q)
    tl.store(q_at + half, high, mask=of_q)
    tl.store(k_at, low, mask=of_k)
    tl.store(k_at + half, high, mask=of_k)


def rotate_(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor, head_dim: int) -> None:
    """Rotate the heads of q and k (tokens, heads * head_dim) in place; tokens may be strided.

    `positions` (tokens,) int64 says which row of `angles` (positions, 2 half: cosines, then sines) a token has. The
    first `half` columns of a head are rotated with the second, and any others stay.
    """
    heads = q.shape[1] // head_dim, k.shape[1] // head_dim
    half, together = angles.shape[1] // 2, 8
    if q.shape[0]:
        _rotate_kernel[(q.shape[0], triton.cdiv(sum(heads), together))](
            positions,
            q,
            k,
            angles,
            *heads,
            q.stride(0),
            k.stride(0),
            head_dim,
            half,
            HEADS=together,
            BLOCK=triton.next_power_of_2(half),
            num_warps=2,
            **early(q.device),
        )
