"""The Triton kernels around the recurrence of linear attention: the convolution before it and the norm after it.

Each reads its operands about once, computes in float32 and rounds once, where the twins in plain torch read and write
many float32 copies. Backward passes compute again what they need and keep the inputs alone. Sums have a fixed order and
nothing is summed by atomics, so results repeat to the bit. `convolve` and `gated_norm` of `qerl.model.gated_delta`
describe what is computed, and have the same arguments.
"""
# ruff: noqa: RUF005 - Triton does not unpack tuples

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from qerl.model.packing import Copies

COLUMNS, TOKENS = 256, 16  # of a program of the convolution, at most
BACKWARD_COLUMNS, RUN = 128, 32  # of a program of its backward pass, which also reads the `taps` tokens after its own
ROWS = 4  # heads of a program of the norm: one warp holds them, and rows need no exchange between warps


@triton.jit
def _taps_of(weight_ptr, column, TAPS: tl.constexpr):
    """The columns' weights, float32, tap by tap."""
    taps = ()
    for tap in tl.static_range(TAPS):
        taps = taps + (tl.load(weight_ptr + column * TAPS + tap).to(tl.float32),)
    return taps


@triton.jit
def _read(x_ptr, reads_ptr, token, tap, column, tokens, stride, TAPS: tl.constexpr):
    """x[reads[token, tap]] in float32, for one token or a vector of them; zeros for row and token `tokens` or more."""
    row = tl.load(reads_ptr + token * TAPS + tap, mask=token < tokens, other=tokens)
    if len(row.shape) > 0:
        row = row[:, None]
    return tl.load(x_ptr + row * stride + column, mask=row < tokens, other=0.0).to(tl.float32)


@triton.jit
def _inner(x_ptr, reads_ptr, weights, token, column, tokens, stride, TAPS: tl.constexpr):
    """What silu is taken of, for one token or a vector of them."""
    total = 0.0
    for tap in tl.static_range(TAPS):
        total += _read(x_ptr, reads_ptr, token, tap, column, tokens, stride, TAPS) * weights[tap]
    return total


@triton.jit
def _part(q_ptr, k_ptr, v_ptr, first, keys, values):
    """The part that has the columns from `first` on: where column 0 of its first row would be, and its width."""
    part_ptr, width = q_ptr, keys
    if first >= 2 * keys:
        part_ptr, width = v_ptr - 2 * keys, values
    elif first >= keys:
        part_ptr = k_ptr - keys
    return part_ptr, width


@triton.jit(do_not_specialize=["tokens"])
def _conv_forward(
    x_ptr,
    reads_ptr,
    weight_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tokens,
    stride,
    keys,
    values,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(0) * COLUMNS
    column = (first + tl.arange(0, COLUMNS))[None, :]
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    weights = _taps_of(weight_ptr, column, TAPS)
    inner = _inner(x_ptr, reads_ptr, weights, token, column, tokens, stride, TAPS)
    out = inner * tl.sigmoid(inner)
    part_ptr, width = _part(q_ptr, k_ptr, v_ptr, first, keys, values)
    at = token[:, None] * width + column
    tl.store(part_ptr + at, out.to(q_ptr.dtype.element_ty), mask=token[:, None] < tokens)


@triton.jit
def _by_inner(x_ptr, reads_ptr, weights, grad_ptr, width, token, column, tokens, stride, TAPS: tl.constexpr):
    """The gradient of a token's `_inner`; zeros for token `tokens` or more."""
    inner = _inner(x_ptr, reads_ptr, weights, token, column, tokens, stride, TAPS)
    grad = tl.load(grad_ptr + token * width + column, mask=token < tokens, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(inner)
    return grad * sigmoid * (1.0 + inner * (1.0 - sigmoid))


@triton.jit(do_not_specialize=["tokens"])
def _conv_backward(
    x_ptr,
    reads_ptr,
    order_ptr,
    starts_ptr,
    weight_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dx_ptr,
    partial_ptr,
    tokens,
    stride,
    out_stride,
    keys,
    values,
    TAPS: tl.constexpr,
    TRAINED: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of each row is the sum over the tokens that read it, in the order of their list.

    First in the list are tokens that follow the row itself, whose gradients are at hand. After them come tokens of the
    other sequences that go on from a prompt's end, whose gradients are computed again.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    grad_ptr, width = _part(dq_ptr, dk_ptr, dv_ptr, tl.program_id(0) * COLUMNS, keys, values)
    weights = _taps_of(weight_ptr, column, TAPS)
    first = tl.program_id(1).to(tl.int64) * RUN
    end = tl.minimum(first + RUN, tokens)
    zeros = tl.zeros((COLUMNS,), tl.float32)
    recent = (zeros,) * (2 * TAPS - 1)  # `_by_inner` of the tokens from `token - (TAPS - 1)` on
    by_weights = (zeros,) * TAPS
    for step in range(0, RUN + TAPS, TAPS):
        token = first + step
        for ahead in tl.static_range(TAPS):  # the loads of these do not wait for each other
            at = token + ahead
            by_inner = _by_inner(x_ptr, reads_ptr, weights, grad_ptr, width, at, column, tokens, stride, TAPS)
            recent = recent[1:] + (by_inner,)
            if TRAINED:
                by_inner = tl.where(at < end, by_inner, 0.0)
                for tap in tl.static_range(TAPS):  # the first becomes the last, until all are in their order again
                    x = _read(x_ptr, reads_ptr, at, tap, column, tokens, stride, TAPS)
                    by_weights = by_weights[1:] + (by_weights[0] + by_inner * x,)
        for ahead in tl.static_range(TAPS):
            row = token + ahead - (TAPS - 1)
            if (row >= first) & (row < end):
                total = zeros
                reader = tl.load(starts_ptr + row)
                for behind in tl.static_range(TAPS):
                    at = row + behind
                    flat = at * TAPS + TAPS - 1 - behind
                    if tl.load(reads_ptr + flat, mask=at < tokens, other=tokens) == row:
                        total += weights[TAPS - 1 - behind] * recent[ahead + behind]
                        reader += 1
                for other in range(reader, tl.load(starts_ptr + row + 1)):
                    flat = tl.load(order_ptr + other)
                    at = flat // TAPS
                    by_inner = _by_inner(x_ptr, reads_ptr, weights, grad_ptr, width, at, column, tokens, stride, TAPS)
                    total += tl.load(weight_ptr + column * TAPS + flat % TAPS).to(tl.float32) * by_inner
                tl.store(dx_ptr + row * out_stride + column, total.to(dx_ptr.dtype.element_ty))
    if TRAINED:
        for tap in tl.static_range(TAPS):
            at = tl.program_id(1).to(tl.int64) * TAPS + tap
            tl.store(partial_ptr + at * (2 * keys + values) + column, by_weights[tap])


@triton.jit(do_not_specialize=["rows"])
def _norm_forward(
    x_ptr, gate_ptr, weight_ptr, out_ptr, rows, heads, stride, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < width)
    at = row * width + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate_at = (row // heads) * stride + (row % heads) * width + column
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    out = x * scale[:, None] * weight * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    grad_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    rows,
    heads,
    stride,
    width,
    eps,
    TRAINED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < width)
    at = row * width + column
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate_at = (row // heads) * stride + (row % heads) * width + column
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    sigmoid = tl.sigmoid(gate)
    hat, silu = x * scale, gate * sigmoid
    by_hat = grad * weight * silu
    dx = scale * (by_hat - hat * (tl.sum(by_hat * hat, 1) / width)[:, None])
    dgate = grad * hat * weight * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    if TRAINED:
        at = tl.program_id(0).to(tl.int64) * width + tl.arange(0, WIDTH)
        tl.store(partial_ptr + at, tl.sum(grad * hat * silu, 0), mask=tl.arange(0, WIDTH) < width)


def convolve(x: torch.Tensor, weight: torch.Tensor, reads: Copies, widths: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """See the twin. q, k and v are contiguous, and the gate is a view of x. Keeps x."""
    return _Convolution.apply(x, weight, *reads, widths)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the twin. Keeps x and the gate."""
    return _GatedNorm.apply(x, gate, weight, eps)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        rows: torch.Tensor,
        order: torch.Tensor,
        starts: torch.Tensor,
        widths: tuple[int, int],
    ):
        ctx.save_for_backward(x, weight, rows, order, starts)
        ctx.widths = keys, values = widths
        (columns, taps), tokens = weight.shape, len(x)
        q, k, v = (x.new_empty(tokens, width) for width in (keys, keys, values))
        block = math.gcd(COLUMNS, *widths)  # so that none has columns of two parts
        _conv_forward[(columns // block, triton.cdiv(tokens, TOKENS))](
            *(x, rows, weight, q, k, v, tokens, x.stride(0), keys, values),
            TAPS=taps,
            TOKENS=TOKENS,
            COLUMNS=block,
        )
        return q, k, v, x.detach()[:, columns:]

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dgate: torch.Tensor):
        x, weight, rows, order, starts = ctx.saved_tensors
        (columns, taps), tokens = weight.shape, len(x)
        dx, runs = x.new_empty(x.shape), triton.cdiv(tokens, RUN)
        trained, block = ctx.needs_input_grad[1], math.gcd(BACKWARD_COLUMNS, *ctx.widths)
        partial = x.new_empty(runs if trained else 0, taps, columns, dtype=torch.float32)
        grads = (grad.contiguous() for grad in (dq, dk, dv))
        _conv_backward[(columns // block, runs)](
            *(x, rows, order, starts, weight, *grads, dx, partial),
            *(tokens, x.stride(0), dx.stride(0), *ctx.widths),
            TAPS=taps,
            TRAINED=trained,
            RUN=RUN,
            COLUMNS=block,
            num_warps=1,
        )
        dx[:, columns:].copy_(dgate)
        by_weight = partial.sum(0).t().to(weight.dtype) if trained else None
        return dx, by_weight, None, None, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        out, (_, heads, width) = torch.empty_like(x), x.shape
        rows = x.numel() // width
        _norm_forward[(triton.cdiv(rows, ROWS),)](
            *(x, gate, weight, out, rows, heads, gate.stride(0), width, eps),
            ROWS=ROWS,
            WIDTH=triton.next_power_of_2(width),
            num_warps=1,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, gate, weight = ctx.saved_tensors
        dx, dgate, (_, heads, width) = torch.empty_like(x), x.new_empty(gate.shape), x.shape
        rows, trained = x.numel() // width, ctx.needs_input_grad[2]
        programs = triton.cdiv(rows, ROWS)
        partial = x.new_empty(programs if trained else 0, width, dtype=torch.float32)
        _norm_backward[(programs,)](
            *(grad.contiguous(), x, gate, weight, dx, dgate, partial),
            *(rows, heads, gate.stride(0), width, ctx.eps),
            TRAINED=trained,
            ROWS=ROWS,
            WIDTH=triton.next_power_of_2(width),
            num_warps=1,
        )
        return dx, dgate, partial.sum(0).to(weight.dtype) if trained else None, None
