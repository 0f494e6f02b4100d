"""The adapter on the experts of a layer.

Each projection has A and B for every expert (3-d), or one that all of them share (2-d):

    gate_up   A (rank, hidden) or (experts, rank, hidden)        B (experts, 2 width, rank)
    down      A (experts, rank, width)                           B (hidden, rank) or (experts, hidden, rank)

What is shared is on the outside, next to the residual stream. It is then multiplied with each token once, instead of
once for each of its experts, and has a fraction of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qerl.model.factors import cast
from qerl.model.grouped import ALIGNED, grouped_outer, grouped_product
from qerl.model.lora import product_32
from qerl.model.routing import Routed


@dataclass(frozen=True)
class ExpertFactors:
    """The factors of both projections, as in the module docstring, and the scale that B is multiplied by."""

    gate_up_a: torch.Tensor
    gate_up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor
    scale: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that receive gradients."""
        return self.gate_up_a, self.gate_up_b, self.down_a, self.down_b

    def prepared(self, dtype: torch.dtype) -> ExpertFactors:
        """The factors as the products read them: in `dtype`, with rows that `grouped` multiplies at once on a GPU."""
        a = [_padded(cast(factor, dtype), -2) for factor in (self.gate_up_a, self.down_a)]
        b = [_padded(cast(factor, dtype), -1) for factor in (self.gate_up_b, self.down_b)]
        return ExpertFactors(a[0], b[0], a[1], b[1], self.scale)

    def own_sizes(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of prepared factors, in the order of `tensors`, as those of the factors themselves."""
        pairs = zip(gradients, self.tensors, strict=True)
        return [grad[..., : own.shape[-2], : own.shape[-1]].to(own.dtype) for grad, own in pairs]


def add_gate_up_(inner: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, routed: Routed, lora: ExpertFactors):
    """inner (M, 2 width) += s B A x for x (T, hidden) with `rows` (M, hidden); returns h = A x, (T or M, rank)."""
    shared = lora.gate_up_a.dim() == 2
    h = x @ lora.gate_up_a.t() if shared else _product(rows, lora.gate_up_a, routed)
    inner.add_(_product(h[routed.token] if shared else h, lora.gate_up_b, routed), alpha=lora.scale)
    return h


def gate_up_backward_(
    dx_rows: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, h: torch.Tensor, routed: Routed, lora: ExpertFactors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dA, dB, dx) for grad (M, 2 width). The adapter's part of the gradient to x is added to dx_rows (M, hidden).

    For an A that all experts share it is dx (T, hidden) instead, which else is None.
    """
    shared = lora.gate_up_a.dim() == 2
    h_rows = h[routed.token] if shared else h
    db = grouped_outer(grad, h_rows, routed.ends).mul_(lora.scale)
    g = grouped_product(grad, lora.gate_up_b, routed.ends).mul_(lora.scale)
    if shared:
        g = routed.sum_of(g).to(x.dtype)
        return product_32(g.t(), x), db, g @ lora.gate_up_a
    dx_rows.add_(grouped_product(g, lora.gate_up_a, routed.ends))
    return grouped_outer(g, x[routed.token], routed.ends), db, None


def add_down_(y_rows: torch.Tensor, activation: torch.Tensor, routed: Routed, lora: ExpertFactors):
    """(h, added) for activation (M, width): h = A activation (M, rank), and what the tokens get of it, (T, hidden).

    For a B that each expert has, y_rows (M, hidden) += s B h instead, and the tokens get None.
    """
    h = _product(activation, lora.down_a, routed)
    if lora.down_b.dim() == 2:
        summed = routed.sum_of(h, routed.weights).to(h.dtype)
        return h, (summed @ lora.down_b.t()).mul_(lora.scale)
    y_rows.add_(_product(h, lora.down_b, routed), alpha=lora.scale)
    return h, None


def down_to_h(grad: torch.Tensor, grad_rows: torch.Tensor, routed: Routed, lora: ExpertFactors) -> torch.Tensor:
    """g (M, rank), the gradient to h but for the rows' weights; `grad` is dy (T, hidden), `grad_rows` (M, hidden) its
    rows."""
    if lora.down_b.dim() == 2:
        return (grad @ lora.down_b).mul_(lora.scale)[routed.token]
    return grouped_product(grad_rows, lora.down_b, routed.ends).mul_(lora.scale)


def down_factors_backward(
    activation: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor],
    h: torch.Tensor,
    g: torch.Tensor,
    routed: Routed,
    lora: ExpertFactors,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dA, dB) from the activation (M, width), `grad` and `grad_rows` of `down_to_h`, h and g (M, rank)."""
    grad, grad_rows = grads
    weights = routed.weight_of_rows()
    if lora.down_b.dim() == 2:
        db = product_32(grad.t(), routed.sum_of(h, routed.weights).to(h.dtype))
    else:
        db = grouped_outer(grad_rows, (h * weights).to(h.dtype), routed.ends)
    return grouped_outer((g * weights).to(g.dtype), activation, routed.ends), db.mul_(lora.scale)


def _product(rows: torch.Tensor, factor: torch.Tensor, routed: Routed) -> torch.Tensor:
    """rows (M, n) times the transpose of each expert's factor (experts, m, n)."""
    return grouped_product(rows, factor.transpose(1, 2), routed.ends)


def _padded(factor: torch.Tensor, dim: int) -> torch.Tensor:
    missing = -factor.shape[dim] % (ALIGNED // factor.element_size())
    if not missing or not factor.is_cuda:
        return factor
    return F.pad(factor, (0, missing) if dim == -1 else (0, 0, 0, missing))
