"""Copy rows, and sum the gradients of the copies: completions that share a prompt each read a copy of its rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable


class Copies(NamedTuple):
    """K copies of T rows. `order` and `starts` invert `rows`: they list the copies of each row, for the sum."""

    rows: torch.Tensor  # (K,) the row that each copy is taken from
    order: torch.Tensor  # (K,) the copies sorted by row, stably
    starts: torch.Tensor  # (T + 1,) where the copies of each row begin in `order`


def copies_of(rows: torch.Tensor, count: int) -> Copies:
    """The copies that take `rows` (K,) out of `count` rows."""
    ordered, order = torch.sort(rows, stable=True)
    return Copies(rows, order, torch.searchsorted(ordered, torch.arange(count + 1, device=rows.device)))


def gather_rows(rows: torch.Tensor, copies: Copies) -> torch.Tensor:
    """The copies (K, ...) of rows (T, ...). Their gradients are summed in float32, always in the same order."""
    return _Gather.apply(rows, *copies)


class _Gather(torch.autograd.Function):
    """See `gather_rows`."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, index: torch.Tensor, order: torch.Tensor, starts: torch.Tensor):
        ctx.save_for_backward(index, order, starts)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        copies = Copies(*ctx.saved_tensors)
        if not grad.is_cuda:
            return sum_copies(grad, copies), None, None, None
        from training.policy import copies_kernel

        return copies_kernel.sum_copies(grad, copies), None, None, None


def sum_copies(grad: torch.Tensor, copies: Copies) -> torch.Tensor:
    """(T, ...): the sum of grad (K, ...) over each row's copies, rounded once; on a CPU in the order of the copies."""
    total = grad.new_zeros(len(copies.starts) - 1, *grad.shape[1:], dtype=torch.float32)
    return total.index_add_(0, copies.rows, grad.float()).to(grad.dtype)
