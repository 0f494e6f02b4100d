"""Triton kernels for SwiGLU that add the adapters' low-rank terms as they read. Twins: `qerl.layers.twins`.

A term s h B^T of gate and up is as large as they are, and was written and read once more for the base product to be
added to it; here it is made from its factors (rank 32: a thousandth of that) where gate and up are read anyway. The
same for the term g A of the activation's gradient. Float32 inside, rounded once, nothing is summed by atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qerl.layers.twins import Term

ROWS, COLUMNS = 32, 128  # of a tile
TILES = 8  # of a program, one below the other, so that it reads the right factors once


@triton.jit
def _left(ptr, stride, rank, row, rows, RANK: tl.constexpr):
    k = tl.arange(0, RANK)
    inside = (row < rows)[:, None] & (k < rank)[None, :]
    return tl.load(ptr + row[:, None].to(tl.int64) * stride + k[None, :], mask=inside, other=0.0)


@triton.jit
def _right(ptr, k_stride, n_stride, rank, column, columns, RANK: tl.constexpr):
    k = tl.arange(0, RANK)
    inside = (k < rank)[:, None] & (column < columns)[None, :]
    return tl.load(ptr + k[:, None] * k_stride + column[None, :] * n_stride, mask=inside, other=0.0)


@triton.jit
def _swiglu(
    x_ptr,
    grad_ptr,
    out_ptr,
    rows,
    columns,
    gate_left, gate_stride, gate_right, gate_k, gate_n, gate_rank, gate_scale,
    up_left, up_stride, up_right, up_k, up_n, up_rank, up_scale,
    grad_left, grad_stride, grad_right, grad_k, grad_n, grad_rank, grad_scale,
    BACKWARD: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """GATE, UP, GRAD: the columns that the term's factors are read with, 0 without that term."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if GATE:
        gate_factor = _right(gate_right, gate_k, gate_n, gate_rank, column, columns, GATE)
    if UP:
        up_factor = _right(up_right, up_k, up_n, up_rank, column, columns, UP)
    if GRAD:
        grad_factor = _right(grad_right, grad_k, grad_n, grad_rank, column, columns, GRAD)
    for tile in range(TILES):
        row = (tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        gate_at = row[:, None].to(tl.int64) * 2 * columns + column[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        gate = tl.load(x_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + gate_at + columns, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            left = _left(gate_left, gate_stride, gate_rank, row, rows, GATE)
            gate += tl.dot(left, gate_factor, input_precision="ieee") * gate_scale
        if UP:
            left = _left(up_left, up_stride, up_rank, row, rows, UP)
            up += tl.dot(left, up_factor, input_precision="ieee") * up_scale
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if BACKWARD:
            grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if GRAD:
                left = _left(grad_left, grad_stride, grad_rank, row, rows, GRAD)
                grad += tl.dot(left, grad_factor, input_precision="ieee") * grad_scale
            gate_grad = grad * up * (sigmoid + silu * (1.0 - sigmoid))
            tl.store(out_ptr + gate_at, gate_grad.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(out_ptr + gate_at + columns, (grad * silu).to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(grad_ptr + at, (silu * up).to(grad_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(out_ptr + at, (silu * up).to(out_ptr.dtype.element_ty), mask=inside)


def swiglu_forward(x: torch.Tensor, gate: Term | None = None, up: Term | None = None) -> torch.Tensor:
    """See the twin."""
    out = x.new_empty(len(x), x.shape[1] // 2)
    _launch((x, x, out), out.shape, (gate, up, None), False)
    return out


def swiglu_backward_(
    x: torch.Tensor,
    grad: torch.Tensor,
    gate: Term | None = None,
    up: Term | None = None,
    grad_term: Term | None = None,
) -> torch.Tensor:
    """See the twin."""
    out = torch.empty_like(x)
    _launch((x, grad, out), grad.shape, (gate, up, grad_term), True)
    return out


def _launch(
    tensors: tuple[torch.Tensor, ...], shape: torch.Size, terms: tuple[Term | None, ...], backward: bool
) -> None:
    rows, columns = shape
    if not rows:
        return
    arguments, ranks = [], []
    for term in terms:
        if term is None:
            arguments += [tensors[0], 0, tensors[0], 0, 0, 0, 0.0]
            ranks.append(0)
            continue
        left, right, scale = term
        assert left.stride(1) == 1
        arguments += [left, left.stride(0), right, *right.stride(), left.shape[1], float(scale)]
        ranks.append(max(16, triton.next_power_of_2(left.shape[1])))  # the least that a product of tensor cores sums
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS * TILES))
    flags = dict(zip(("GATE", "UP", "GRAD"), ranks, strict=True)) | {"ROWS": ROWS, "COLUMNS": COLUMNS, "TILES": TILES}
    _swiglu[grid](*tensors, rows, columns, *arguments, BACKWARD=backward, **flags, num_warps=8)
