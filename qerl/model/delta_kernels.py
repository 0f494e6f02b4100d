"""The Triton kernels of linear attention: the convolution before the recurrence and the norm after it, the products of
the recurrence's backward pass that fla-core refuses to compute on Hopper, and a decode step behind its convolution.

Each reads its operands about once, computes in float32 and rounds once, where the twins in plain torch read and write
many float32 copies. Backward passes compute again what they need and keep the inputs alone. Sums have a fixed order and
nothing is summed by atomics, so results repeat to the bit. `convolve` and `gated_norm` of `qerl.model.gated_delta`
describe what is computed, and have the same arguments; `delta_step_twin_` is that of a decode step.

The products are in one launch. On Hopper, Triton 3.4 to 3.7.0 transposes the result of a product wrongly where it
becomes the first operand of another (fla-org/flash-linear-attention#640). This kernel transposes none: it computes A^T
as a product of its own. For 16,384 tokens of 48 heads of 128 it moves 1.9 GB, for which an H200 needs 0.45 ms by
calculation. It takes 1.3 ms there, and 0.9 ms for 32 heads. Its test has the twin: autograd in float64.

A decode step reads and writes each value head's state, 8 bytes for each of its key dim x value dim numbers. vLLM 0.25.1
has a launch for the recurrence, one for the gated norm and five copies around them, where this is one.
"""
# ruff: noqa: RUF005 - Triton does not unpack tuples

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from qerl.formats.cuda.nvrtc import early
from qerl.model.gated_delta import DeltaLayer
from qerl.model.packing import Copies

COLUMNS, TOKENS = 256, 16  # of a program of the convolution, at most
BACKWARD_COLUMNS, RUN = 128, 32  # of a program of its backward pass, which also reads the `taps` tokens after its own
PRODUCT_COLUMNS = 64  # of keys that a program of the products computes; of values that it reads at once
# For a decode step's program: its warps, the values that it computes at once, and the keys of a group. For at most FEW
# rows, and for more.
FEW, STEP_OF_FEW, STEP_OF_MANY = 8, (8, 64, 32), (2, 64, 64)
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
def _gated_norm_forward(
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
def _gated_norm_backward(
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


@triton.jit(do_not_specialize=["tokens"])
def _products(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dv_ptr,
    h_ptr,
    dh_ptr,
    g_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
    dg_ptr,
    starts_ptr,
    chunks_ptr,
    scale,
    tokens,
    SHARED: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    chunk, key_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sequence, number = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    first = tl.load(starts_ptr + sequence).to(tl.int64) + number.to(tl.int64) * SIZE
    count = tl.minimum(tl.load(starts_ptr + sequence + 1).to(tl.int64) - first, SIZE).to(tl.int32)
    heads: tl.constexpr = KEY_HEADS * SHARED
    row = tl.arange(0, SIZE)
    key = part * COLUMNS + tl.arange(0, COLUMNS)
    token, own, inside = first + row, row < count, key < KEY_DIM
    keyed = own[:, None] & inside[None, :]
    at_key = (token[:, None] * KEY_HEADS + key_head) * KEY_DIM + key[None, :]
    q = tl.load(q_ptr + at_key, mask=keyed, other=0.0)
    k = tl.load(k_ptr + at_key, mask=keyed, other=0.0)
    all_dq = tl.zeros((SIZE, COLUMNS), tl.float32)
    all_dk = tl.zeros((SIZE, COLUMNS), tl.float32)
    for head in range(key_head * SHARED, key_head * SHARED + SHARED):
        inner = tl.zeros((SIZE, SIZE), tl.float32)
        turned = tl.zeros((SIZE, SIZE), tl.float32)
        dq = tl.zeros((SIZE, COLUMNS), tl.float32)
        dk = tl.zeros((SIZE, COLUMNS), tl.float32)
        dw = tl.zeros((SIZE, COLUMNS), tl.float32)
        of_last = 0.0
        for begin in range(0, VALUE_DIM, COLUMNS):
            value = begin + tl.arange(0, COLUMNS)
            valued = own[:, None] & (value < VALUE_DIM)[None, :]
            at_value = (token[:, None] * heads + head) * VALUE_DIM + value[None, :]
            v = tl.load(v_ptr + at_value, mask=valued, other=0.0)
            do = tl.load(do_ptr + at_value, mask=valued, other=0.0)
            dv = tl.load(dv_ptr + at_value, mask=valued, other=0.0)
            at_state = ((chunk * heads + head) * KEY_DIM + key[None, :]) * VALUE_DIM + value[:, None]
            stated = (value < VALUE_DIM)[:, None] & inside[None, :]
            h = tl.load(h_ptr + at_state, mask=stated, other=0.0)
            dh = tl.load(dh_ptr + at_state, mask=stated, other=0.0)
            of_last += tl.sum(h.to(tl.float32) * dh.to(tl.float32))
            inner = tl.dot(do, tl.trans(v), inner)
            turned = tl.dot(v, tl.trans(do), turned)
            dq = tl.dot(do, h.to(do.dtype), dq)
            dk = tl.dot(v, dh.to(v.dtype), dk)
            dw = tl.dot(dv, h.to(dv.dtype), dw)
        at_dw = (token[:, None] * heads + head) * KEY_DIM + key[None, :]
        tl.store(dw_ptr + at_dw, -dw.to(dw_ptr.dtype.element_ty), mask=keyed)
        g = tl.load(g_ptr + token * heads + head, mask=own, other=0.0)
        last = tl.load(g_ptr + (first + count - 1) * heads + head)
        decay = tl.exp2(g[:, None] - g[None, :])
        below = (row[:, None] >= row[None, :]) & own[:, None]
        inner = tl.where(below, inner * decay * scale, 0.0).to(q.dtype)
        decay = tl.exp2(g[None, :] - g[:, None])
        above = (row[:, None] <= row[None, :]) & own[None, :]
        turned = tl.where(above, turned * decay * scale, 0.0).to(q.dtype)
        dq *= (tl.exp2(g) * scale)[:, None]
        dk *= tl.where(own, tl.exp2(last - g), 0.0)[:, None]
        of_last = tl.exp2(last) * of_last + tl.sum(dk * k.to(tl.float32))
        dq = tl.dot(inner, k, dq)
        dk = tl.dot(turned, q, dk)
        dg = tl.sum(dq * q.to(tl.float32), 1) - tl.sum(dk * k.to(tl.float32), 1)
        dg = tl.where(row == count - 1, dg + of_last, dg)
        tl.store(dg_ptr + (part.to(tl.int64) * tokens + token) * heads + head, dg, mask=own)
        all_dq += dq
        all_dk += dk
    tl.store(dq_ptr + at_key, all_dq.to(dq_ptr.dtype.element_ty), mask=keyed)
    tl.store(dk_ptr + at_key, all_dk.to(dk_ptr.dtype.element_ty), mask=keyed)


@triton.jit
def _delta_step(
    qkvz_ptr,
    ba_ptr,
    log_decay_ptr,
    bias_ptr,
    gain_ptr,
    indices_ptr,
    states_ptr,
    out_ptr,
    qkvz_stride,
    ba_stride,
    index_stride,
    state_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    EARLY: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads: tl.constexpr = KEY_HEADS * SHARED
    # A lane holds four keys of each group. So fewer lanes share a value, and a sum over keys takes fewer shuffles.
    key = tl.arange(0, GROUPS)[:, None] * (KEYS // GROUPS) + tl.arange(0, KEYS // GROUPS)[None, :]
    of_key = key < KEY_DIM
    slope = -tl.exp(tl.load(log_decay_ptr + head).to(tl.float32))  # no launch of a step writes these
    bias = tl.load(bias_ptr + head).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    place = tl.load(indices_ptr + row * index_stride).to(tl.int64)
    out_ptr += (row * heads + head) * VALUE_DIM
    all_values = tl.arange(0, VALUES)
    if place <= 0:  # a row that only fills up a CUDA graph
        tl.store(out_ptr + all_values, tl.zeros((VALUES,), out_ptr.dtype.element_ty), mask=all_values < VALUE_DIM)
        return
    states_ptr += place * state_stride + head * VALUE_DIM * KEY_DIM
    qkvz_ptr += row * qkvz_stride
    at_key = (head // SHARED) * KEY_DIM + key
    q = tl.load(qkvz_ptr + at_key, mask=of_key, other=0.0).to(tl.float32)
    k = tl.load(qkvz_ptr + KEY_HEADS * KEY_DIM + at_key, mask=of_key, other=0.0).to(tl.float32)
    qkvz_ptr += 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    beta = tl.sigmoid(tl.load(ba_ptr + row * ba_stride + head).to(tl.float32))
    rate = tl.load(ba_ptr + row * ba_stride + heads + head).to(tl.float32) + bias
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    rate = tl.where(rate <= 20.0, tl.log(1.0 + tl.exp(rate)), rate)
    decay = tl.exp(slope * rate)
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * KEY_DIM**-0.5
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    of_added = tl.sum(k * q)
    squares = 0.0
    for first in range(0, VALUES, CHUNK):
        value = first + tl.arange(0, CHUNK)
        of_value = value < VALUE_DIM
        at = value[:, None, None] * KEY_DIM + key[None, :, :]
        inside = of_value[:, None, None] & of_key[None, :, :]
        state = tl.load(states_ptr + at, mask=inside, other=0.0).to(tl.float32) * decay
        v = tl.load(qkvz_ptr + value, mask=of_value, other=0.0).to(tl.float32)
        added = beta * (v - tl.sum(tl.sum(state * k[None, :, :], 1), 1))
        out = tl.sum(tl.sum(state * q[None, :, :], 1), 1) + added * of_added
        tl.store(states_ptr + at, state + added[:, None, None] * k[None, :, :], mask=inside)
        out = out.to(out_ptr.dtype.element_ty)  # as the recurrence of training rounds it
        tl.store(out_ptr + value, out, mask=of_value)
        squares += tl.sum(out.to(tl.float32) * out.to(tl.float32))
    tl.debug_barrier()  # the norm reads what other warps have stored
    of_value = all_values < VALUE_DIM
    gain = tl.load(gain_ptr + all_values, mask=of_value, other=0.0).to(tl.float32)
    z = tl.load(qkvz_ptr + heads * VALUE_DIM + all_values, mask=of_value, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + all_values, mask=of_value, other=0.0).to(tl.float32)
    out *= tl.rsqrt(squares / VALUE_DIM + eps) * gain * z * tl.sigmoid(z)
    tl.store(out_ptr + all_values, out.to(out_ptr.dtype.element_ty), mask=of_value)


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
        _gated_norm_forward[(triton.cdiv(rows, ROWS),)](
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
        _gated_norm_backward[(programs,)](
            *(grad.contiguous(), x, gate, weight, dx, dgate, partial),
            *(rows, heads, gate.stride(0), width, ctx.eps),
            TRAINED=trained,
            ROWS=ROWS,
            WIDTH=triton.next_power_of_2(width),
            num_warps=1,
        )
        return dx, dgate, partial.sum(0).to(weight.dtype) if trained else None, None


def products_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    w: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk (1, T, H, K), dw (1, T, HV, K) and dg, float32 (1, T, HV), as fla-core's `chunk_bwd_dqkwg`.

    A chunk has the state h before it, the gradient dh of the state after it, and logarithms to base 2 of cumulative
    decays g. Its output is scale (2^g q h + A v), with A = q k^T 2^(g_i - g_j) on and below the diagonal, and the state
    after it 2^(g_last) h + (2^(g_last - g) k)^T v. There v stands for u - w h, and dv is its gradient. q and k are
    (1, T, H, K), v, do and dv (1, T, HV, V), h and dh (1, chunks, HV, K, V), and chunk_indices (chunks, 2) has each
    chunk's sequence and its number there. dg is the gradient of g ln 2, not yet summed over later tokens.
    """
    assert not state_v_first, "the gated delta rule of packed rows keeps its states by key dimension"
    tokens, heads, key_dim = q.shape[1:]
    values, value_dim = v.shape[2:]
    parts = triton.cdiv(key_dim, PRODUCT_COLUMNS)
    dq, dk, dw = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
    dg = g.new_empty(parts, tokens, values)
    _products[(len(chunk_indices), heads, parts)](
        *(q, k, v, do, dv, h, dh, g),
        *(dq, dk, dw, dg, cu_seqlens, chunk_indices),
        key_dim**-0.5 if scale is None else scale,
        tokens,
        SHARED=values // heads,
        KEY_HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SIZE=chunk_size,
        COLUMNS=PRODUCT_COLUMNS,
        num_warps=8,
        num_stages=3,
    )
    return dq, dk, dw, dg.sum(0, keepdim=True)


def delta_step_(
    qkvz: torch.Tensor, ba: torch.Tensor, states: torch.Tensor, indices: torch.Tensor, layer: DeltaLayer
) -> torch.Tensor:
    """The input of `out_proj` (rows, value heads * value dim) for one new token per row; updates its state.

    `qkvz` is (rows, q, k, v and the gate z), of which q, k and v have been through the convolution, and `ba` (rows, 2
    value heads), b before a. `states` (blocks, value heads, value dim, key dim) are float32 or 16 bits, and `indices`
    (rows,) say which block is a row's; 0 is none, and gives zeros.
    """
    heads, value_dim, key_dim = states.shape[1:]
    key_heads = (qkvz.shape[1] - 2 * heads * value_dim) // (2 * key_dim)
    keys, values = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    warps, at_once, together = STEP_OF_FEW if len(qkvz) <= FEW else STEP_OF_MANY
    out = qkvz.new_empty(len(qkvz), heads * value_dim)
    _delta_step[(heads, len(qkvz))](
        *(qkvz, ba, layer.log_decay, layer.bias, layer.gain, indices, states, out),
        *(qkvz.stride(0), ba.stride(0), indices.stride(0), states.stride(0), layer.eps),
        KEY_HEADS=key_heads,
        SHARED=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEYS=keys,
        VALUES=values,
        GROUPS=max(1, keys // together),
        CHUNK=min(values, at_once),
        num_warps=warps,
        **early(qkvz.device),
    )
    return out
