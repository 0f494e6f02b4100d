"""Triton kernel that sums the gradients of copied rows without atomics, so that sums repeat. Twin: `copies.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from training.policy.copies import Copies

BLOCK = 1024  # columns per program


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
    block = min(BLOCK, triton.next_power_of_2(columns))
    _sum_copies[(rows, triton.cdiv(columns, block))](
        grad, copies.order, copies.starts, out, columns, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out
