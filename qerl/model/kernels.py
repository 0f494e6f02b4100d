"""The Triton kernels of the trainer's forward and backward pass. Each reads its operands once.

Nothing is summed by atomics, so results repeat to the bit. The twins are in plain torch: `twins.py` for RMSNorm, SwiGLU
and rotary embedding, `experts.Routed.sum_of` for the sum over a token's experts, `packing.sum_copies` for the gradients
of copied rows, and `logprobs.reference_chunk` for the log probabilities of a chunk of logits, in two passes where torch
needs six.

RMSNorm, SwiGLU and rotary embedding compute in float32 and round once. liger-kernel 0.8 has the same three, but its
SwiGLU overwrites the saved gate and up, its rotary embedding the gradient of its input, and all three require
contiguous tensors, while a fused projection yields strided ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qerl.model.packing import Copies
from qerl.model.twins import Normed

PROGRAMS = 264  # for a norm whose weight is trained: as many as the 132 multiprocessors of an H200 hold at once
WIDTH = 1024  # columns per SwiGLU program
HEADS = 16  # heads of one token per rotary program, which reads the token's angles once for all of them


@triton.jit
def _row(index, heads, stride, columns):
    """Offset of row `index` in a (tokens, heads, columns) tensor whose tokens are `stride` apart."""
    index = index.to(tl.int64)
    return (index // heads) * stride + (index % heads) * columns


@triton.jit
def _norm_forward(
    x_ptr,
    delta_ptr,
    weight_ptr,
    kept_ptr,
    out_ptr,
    scale_ptr,
    columns,
    heads,
    stride,
    eps,
    ADDS: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row.to(tl.int64) * columns + column
    x = tl.load(x_ptr + _row(row, heads, stride, columns) + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if KEEPS:
        tl.store(kept_ptr + at, x.to(kept_ptr.dtype.element_ty), mask=inside)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)
    out = x * scale * weight
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    skip_ptr,
    out_ptr,
    partial_ptr,
    rows,
    columns,
    heads,
    stride,
    TRAINED: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < columns
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    partial = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0)
    for offset in range(0, rows - first, tl.num_programs(0)):
        row = first + offset
        at = row.to(tl.int64) * columns + column
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + _row(row, heads, stride, columns) + column, mask=inside, other=0.0).to(tl.float32)
        normed = x * tl.load(scale_ptr + row)
        if TRAINED:
            partial += grad * normed
        grad = grad * weight
        out = (grad - normed * (tl.sum(grad * normed, 0) / columns)) * tl.load(scale_ptr + row)
        if SKIPS:
            out += tl.load(skip_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    if TRAINED:
        tl.store(partial_ptr + tl.program_id(0) * columns + column, partial, mask=inside)


@triton.jit
def _sum_three(a_ptr, b_ptr, c_ptr, out_ptr, columns, WIDTH: tl.constexpr):
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    total = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(c_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total, mask=inside)


@triton.jit
def _swiglu_forward(x_ptr, out_ptr, columns, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    gate = tl.load(x_ptr + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _largest_bits(x, dtype: tl.constexpr):
    """The bits of the largest magnitude of x, as a float32, once it is rounded to `dtype`; NaN is above infinity."""
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    return most.to(tl.float32, bitcast=True).to(dtype).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _swiglu_backward(x_ptr, grad_ptr, out_ptr, most_ptr, columns, MEASURES: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    gate_at = row * 2 * columns + column
    gate = tl.load(x_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + gate_at + columns, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    gate_grad, up_grad, out = grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu, silu * up
    tl.store(out_ptr + gate_at, gate_grad.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + gate_at + columns, up_grad.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_ptr + row * columns + column, out.to(grad_ptr.dtype.element_ty), mask=inside)
    if MEASURES:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        most = tl.maximum(_largest_bits(gate_grad, dtype), _largest_bits(up_grad, dtype))
        program = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(most_ptr + program, most)
        tl.store(most_ptr + tl.num_programs(0).to(tl.int64) * tl.num_programs(1) + program, _largest_bits(out, dtype))


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    stride,
    out_stride,
    half,
    SIGN: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    angle = token * 2 * half + column
    cos = tl.load(cos_ptr + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=column < half, other=0.0).to(tl.float32)[None, :] * SIGN
    inside = (head < heads)[:, None] & (column < half)[None, :]
    at = head[:, None] * 2 * half + column[None, :]
    x_ptr += token * stride
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + half + at, mask=inside, other=0.0).to(tl.float32)
    out_ptr += token * out_stride
    tl.store(out_ptr + at, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + half + at, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


def _rows_of(x: torch.Tensor) -> tuple[int, int]:
    """Return (heads, stride) for `_row`; a contiguous x counts as having one head.

    Triton compiles a kernel again when an integer argument changes its divisibility by 16, and for a batch of one row
    the number of heads would be the number of tokens.
    """
    return (1, x.shape[2]) if x.is_contiguous() else (x.shape[1], x.stride(0))


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Normed, torch.Tensor]:
    """See the twin."""
    tokens, heads, columns = x.shape
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    scale = torch.empty(tokens * heads, dtype=torch.float32, device=x.device)
    keeps = delta is not None or out.dtype != x.dtype
    kept = torch.empty_like(out) if keeps else x
    block = triton.next_power_of_2(columns)
    if tokens:
        _norm_forward[(tokens * heads,)](
            x,
            x if delta is None else delta.contiguous(),
            weight,
            kept,
            out,
            scale,
            columns,
            *_rows_of(x),
            eps,
            ADDS=delta is not None,
            KEEPS=keeps,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return Normed(kept, weight, scale), out


def norm_backward(
    grad: torch.Tensor,
    normed: Normed,
    trained: bool,
    skip: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See the twin."""
    x, weight, scale = normed
    tokens, heads, columns = x.shape
    rows = max(1, tokens * heads)
    programs = min(PROGRAMS, rows) if trained else rows
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    partial = x.new_empty(programs if trained else 1, columns, dtype=torch.float32)
    block = triton.next_power_of_2(columns)
    _norm_backward[(programs,)](
        grad.contiguous(),
        x,
        weight,
        scale,
        x if skip is None else skip.contiguous(),
        out,
        partial,
        tokens * heads,
        columns,
        *_rows_of(x),
        TRAINED=trained,
        SKIPS=skip is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out, partial.sum(0) if trained else None


def sum_three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    a, b, c = (part.contiguous() for part in (a, b, c))
    out, columns = torch.empty_like(a, dtype=torch.float32), a.shape[-1]
    if a.numel():
        _sum_three[(a.numel() // columns, triton.cdiv(columns, WIDTH))](a, b, c, out, columns, WIDTH=WIDTH)
    return out


def swiglu_forward(x: torch.Tensor) -> torch.Tensor:
    """See the twin."""
    rows, columns = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, columns)
    if rows:
        _swiglu_forward[(rows, triton.cdiv(columns, WIDTH))](x, out, columns, WIDTH=WIDTH)
    return out


def swiglu_backward_(x: torch.Tensor, grad: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
    """See the twin."""
    rows, columns = grad.shape
    out, parts, measures = torch.empty_like(x), triton.cdiv(columns, WIDTH), largest is not None
    most = torch.empty(2, rows * parts, dtype=torch.int32, device=x.device) if measures else x
    if rows:
        _swiglu_backward[(rows, parts)](x, grad, out, most, columns, MEASURES=measures, WIDTH=WIDTH)
    if measures:
        torch.amax(most, 1, out=largest)
    return out


def rotate_(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """See the twin."""
    tokens, heads, columns = x.shape
    block, together = triton.next_power_of_2(columns // 2), min(HEADS, triton.next_power_of_2(heads))
    if tokens:
        _rotate[(tokens, triton.cdiv(heads, together))](
            x,
            out,
            cos,
            sin,
            heads,
            x.stride(0),
            out.stride(0),
            columns // 2,
            SIGN=sign,
            HEADS=together,
            BLOCK=block,
            num_warps=max(1, together * block // 256),
        )
    return out


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


EXPERT_COLUMNS = 1024  # per program


@triton.jit
def _sum_kernel(
    out_ptr,
    rows_ptr,
    row_ptr,
    weights_ptr,
    columns,
    CHOSEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOSEN):
        row = tl.load(row_ptr + token * CHOSEN + choice)
        own = tl.load(rows_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            own *= tl.load(weights_ptr + token * CHOSEN + choice)
        total += own
    tl.store(out_ptr + token * columns + column, total, mask=inside)


def sum_of_rows(rows: torch.Tensor, row: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """float32 (T, n): the sum of each token's rows of `rows` (M, n), in float32 or 16 bits, times `weights`.

    `row` is int64 (T, k), `weights` float32 (T, k). The choices are added in their order.
    """
    (tokens, chosen), columns = row.shape, rows.shape[1]
    out = torch.empty(tokens, columns, dtype=torch.float32, device=rows.device)
    block = min(EXPERT_COLUMNS, triton.next_power_of_2(columns))
    if out.numel():
        held = None if weights is None else weights.contiguous()
        _sum_kernel[(tokens, triton.cdiv(columns, block))](
            *(out, rows.contiguous(), row.contiguous(), held, columns),
            CHOSEN=chosen,
            WEIGHTED=weights is not None,
            BLOCK=block,
        )
    return out


COPY_BLOCK = 1024  # columns per program


@triton.jit(do_not_specialize_on_alignment=["order_ptr", "starts_ptr"])
def _sum_copies(grad_ptr, order_ptr, starts_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.load(starts_ptr + row)
    for copy in range(0, tl.load(starts_ptr + row + 1) - first):
        at = tl.load(order_ptr + first + copy) * columns + column
        total += tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_copies(grad: torch.Tensor, copies: Copies) -> torch.Tensor:
    """The same as `copies.sum_copies`, its twin in plain torch."""
    grad, rows = grad.contiguous(), len(copies.starts) - 1
    out = grad.new_empty(rows, *grad.shape[1:])
    if not out.numel():
        return out
    columns = out.numel() // rows
    block = min(COPY_BLOCK, triton.next_power_of_2(columns))
    _sum_copies[(rows, triton.cdiv(columns, block))](
        grad, copies.order, copies.starts, out, columns, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out


LANES = 1024  # running sums per row
TOGETHER = 4  # logits that a lane reads at once
LOGIT_BLOCK = 4096  # logits per program of `_slopes`
LOWEST = tl.constexpr(-1e30)  # below every logit, but finite, so that 0 times it is 0

# These hold one number per row. Which of them start at a multiple of 16 bytes depends on the number of rows, and
# without this Triton would compile another kernel for each case.
OF_ROWS = ["targets_ptr", "logprobs_ptr", "entropies_ptr", "tops_ptr", "log_masses_ptr"]


class Measured(NamedTuple):
    """Results of the first pass, one number per row: float32 (m,)."""

    logprobs: torch.Tensor  # of the targets
    entropies: torch.Tensor
    tops: torch.Tensor
    log_masses: torch.Tensor


@triton.jit
def _divided(logits, temperature, SCALED: tl.constexpr):
    return tl.math.div_rn(logits, temperature) if SCALED else logits


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _measure(
    logits_ptr,
    targets_ptr,
    logprobs_ptr,
    entropies_ptr,
    tops_ptr,
    log_masses_ptr,
    columns,
    temperature,
    SCALED: tl.constexpr,
    LANES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * columns
    at = tl.arange(0, LANES)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    top = tl.full((LANES,), LOWEST, tl.float32)
    mass = tl.zeros((LANES,), tl.float32)  # sum exp(z - top)
    weighted = tl.zeros((LANES,), tl.float32)  # sum (z - top) exp(z - top)
    for start in range(0, columns, LANES * TOGETHER):
        inside = start + at < columns
        z = tl.load(logits_ptr + start + at, mask=inside, other=0.0)
        z = tl.where(inside, _divided(z, temperature, SCALED), LOWEST)
        higher = tl.maximum(top, tl.max(z, 1))
        shift = top - higher
        scale = tl.exp(shift)
        z -= higher[:, None]
        p = tl.exp(z)
        weighted = (weighted + shift * mass) * scale + tl.sum(z * p, 1)
        mass = mass * scale + tl.sum(p, 1)
        top = higher
    highest = tl.max(top, 0)
    shift = top - highest
    scale = tl.exp(shift)
    total = tl.sum(mass * scale, 0)
    log_mass = tl.log(total)
    target = _divided(tl.load(logits_ptr + tl.load(targets_ptr + row)), temperature, SCALED)
    tl.store(logprobs_ptr + row, (target - highest) - log_mass)
    tl.store(entropies_ptr + row, log_mass - tl.sum((weighted + shift * mass) * scale, 0) / total)
    tl.store(tops_ptr + row, highest)
    tl.store(log_masses_ptr + row, log_mass)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _slopes(
    logits_ptr,
    targets_ptr,
    entropies_ptr,
    tops_ptr,
    log_masses_ptr,
    slope_ptr,
    entropy_slope_ptr,
    columns,
    temperature,
    cap,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row.to(tl.int64) * columns + column
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0)
    z = _divided(logits, temperature, SCALED)
    log_p = (z - tl.load(tops_ptr + row)) - tl.load(log_masses_ptr + row)
    p = tl.exp(log_p)
    slope = tl.where(column == tl.load(targets_ptr + row), 1.0 - p, -p)
    if CAPPED:
        tanh = logits / cap
        fall = 1.0 - tanh * tanh
        slope *= fall
    tl.store(slope_ptr + at, slope.to(slope_ptr.dtype.element_ty), mask=inside)
    if ENTROPY:
        slope = -p * (log_p + tl.load(entropies_ptr + row))
        if CAPPED:
            slope *= fall
        tl.store(entropy_slope_ptr + at, slope.to(slope_ptr.dtype.element_ty), mask=inside)


def measure_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> Measured:
    """The first pass over logits (m, vocabulary), float32 and not yet divided by the temperature, and targets (m,).

    One program sums a whole row in a fixed order. With z the logits divided by the temperature it keeps for each row
    top = max z and log_mass = log sum exp(z - top), so that log softmax(z) = (z - top) - log_mass, as log_softmax
    computes it. The second pass writes the derivatives that are multiplied by the head, in its dtype.
    """
    measured = Measured(*torch.empty(4, len(targets), dtype=torch.float32, device=logits.device))
    _measure[(len(targets),)](
        logits,
        targets,
        *measured,
        logits.shape[1],
        float(temperature),
        SCALED=temperature != 1.0,
        LANES=LANES,
        TOGETHER=TOGETHER,
        num_warps=8,
    )
    return measured


def slopes_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    measured: Measured,
    shape: tuple[float, float],
    wanted: tuple[torch.dtype, bool],
) -> list[torch.Tensor]:
    """Derivatives (m, vocabulary) of the logprobs with respect to the divided logits, before they were capped.

    `shape` is the temperature, and the cap of the logits or 0. `wanted` is the dtype of the derivatives, and whether
    those of the entropies follow as a second tensor.
    """
    (temperature, cap), (dtype, entropy) = shape, wanted
    rows, columns = logits.shape
    out = [torch.empty(rows, columns, dtype=dtype, device=logits.device) for _ in range(1 + entropy)]
    _slopes[(rows, triton.cdiv(columns, LOGIT_BLOCK))](
        logits,
        targets,
        *measured[1:],
        out[0],
        out[-1],
        columns,
        float(temperature),
        float(cap),
        SCALED=temperature != 1.0,
        CAPPED=cap > 0,
        ENTROPY=entropy,
        BLOCK=LOGIT_BLOCK,
        num_warps=8,
    )
    return out
