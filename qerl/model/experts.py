"""The experts of a decoder layer, y = sum over a token's experts of w_e down_e(silu(gate_e(x)) * up_e(x)), as one node.

The router is frozen and no gradient goes through w_e (`choose`). Tokens are sorted by expert, and each projection is
one grouped product with the weights of all experts of the layer, decoded for it and freed again. Only x, gate, up and
the small products of the adapter are kept; the backward pass computes the input of `down` again. The sum over a token's
experts is float32, and rounded once. Each projection's A and B are per expert (3-d), or shared by all (2-d):

    gate_up   A (rank, hidden) or (experts, rank, hidden)        B (experts, 2 width, rank)
    down      A (experts, rank, width)                           B (hidden, rank) or (experts, hidden, rank)

What is shared is next to the residual stream: it is multiplied with each token once, and has few parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.formats.experts import ExpertWeights
from qerl.formats.linear import product_dtype
from qerl.model.costs import UNRECORDED
from qerl.model.elementwise import kernels_for
from qerl.model.lora import cast, product_32

ALIGNED = 16  # bytes, of the rows that torch's kernel reads


def grouped_product(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x (M, K) times `matrices` (groups, K, N), (M, N) in the dtype of x; `ends` (groups,) int32 are where groups of
    rows end.

    torch multiplies all groups in one launch where it can (`torch.nn.functional.grouped_mm`: 16 bits on a GPU, also
    float32 on a CPU); otherwise they are multiplied one after another. A group may be empty.
    """
    if _at_once(x, matrices):
        return F.grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(len(x), matrices.shape[2])
    for matrix, rows in zip(matrices, _rows(ends), strict=True):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


def grouped_outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """a^T b (groups, N, K) of each group's rows of a (M, N) and b (M, K), summed in float32 and at least that wide."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if _at_once(a, b):
        if a.dtype != wide and _sums_in_float32(a.device):
            return F.grouped_mm(a.t(), b, offs=ends, out_dtype=wide)
        return F.grouped_mm(a.t(), b, offs=ends).to(wide)
    return torch.stack([(a[rows].t() @ b[rows]).to(wide) for rows in _rows(ends)])


def _rows(ends: torch.Tensor) -> list[slice]:
    return [slice(*bounds) for bounds in pairwise([0, *ends.tolist()])]


def _at_once(*operands: torch.Tensor) -> bool:
    """Whether torch has one launch for these."""
    first = operands[0]
    if not hasattr(F, "grouped_mm") or not first.numel():
        return False
    known = (torch.bfloat16,) if first.is_cuda else (torch.bfloat16, torch.float32)
    return first.dtype in known and all(_aligned(operand) for operand in operands)


def _aligned(matrix: torch.Tensor) -> bool:
    """Whether the rows, or the columns, of a matrix are adjacent and begin at multiples of ALIGNED bytes."""
    inner, outer = sorted(matrix.stride()[-2:])
    return inner == 1 and outer * matrix.element_size() % ALIGNED == 0


@cache
def _sums_in_float32(device: torch.device) -> bool:
    """Whether torch's product of 16-bit groups can be float32, which not every version of it has on every device."""
    a, ends = torch.ones(16, 16, dtype=torch.bfloat16, device=device), torch.tensor([16])
    try:
        F.grouped_mm(a.t(), a, offs=ends.to(device, torch.int32), out_dtype=torch.float32)
    except (RuntimeError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Replay:
    """The experts that another forward pass chose for the same T tokens.

    `ids` is uint8 (T, layers with experts, k); a token that is UNRECORDED there makes its own choice. Each layer writes
    into `changed`, float32 (layers with experts,), how many of the `recorded` tokens would now go elsewhere.
    """

    ids: torch.Tensor
    changed: torch.Tensor
    recorded: int

    @classmethod
    def of(cls, ids: torch.Tensor, device: torch.device | None = None) -> Replay:
        """A replay of `ids`, which are on the CPU, on `device`."""
        recorded = int((ids[:, 0, 0] != UNRECORDED).sum())
        if device is not None and device.type == "cuda":
            ids = ids.pin_memory()
        ids = ids.to(device, non_blocking=True)
        return cls(ids, torch.zeros(ids.shape[1], device=ids.device), recorded)

    @property
    def choices(self) -> int:
        """How many choices of a layer for a token are recorded."""
        return self.recorded * len(self.changed)


class Routed(NamedTuple):
    """T tokens with k experts each: M = T * k rows, sorted by expert and within an expert by token."""

    weights: torch.Tensor  # float32 (T, k)
    token: torch.Tensor  # (M,) the token of each row
    row: torch.Tensor  # (T, k) the row of each token's choices
    ends: torch.Tensor  # int32 (experts,) where the rows of each expert end

    def sum_of(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """(T, n): the sum of each token's rows of `rows` (M, n), times `weights` (T, k) if given.

        It is in float32 or wider. Nothing is added by atomics, so that the same rows give the same bits.
        """
        if rows.is_cuda and rows.dtype != torch.float64:
            from qerl.model.kernels import sum_of_rows

            return sum_of_rows(rows, self.row, weights)
        total = rows.new_zeros(len(self.row), rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
        for choice in range(self.row.shape[1]):
            own = rows[self.row[:, choice]]
            if weights is None:
                total += own
            else:
                total.addcmul_(own.to(total.dtype), weights[:, choice, None].to(total.dtype))
        return total

    def weight_of_rows(self) -> torch.Tensor:
        """(M, 1): the weight of each row."""
        return (
            torch.empty_like(self.weights).flatten().index_copy(0, self.row.flatten(), self.weights.flatten())[:, None]
        )


def choose(logits: torch.Tensor, k: int, normalises: bool, given: torch.Tensor | None = None):
    """(ids, weights, own ids), each (T, k), for router logits (T, experts).

    The weights are those of vLLM 0.25.1: a softmax in float32 over the logits, the k largest of it, divided by their
    sum where the model does so, and kept in float32 (transformers rounds them to 16 bits). `given` (T, k) are ids to
    use instead of the k largest, as a `Replay` has them; the weights at them are those of these logits.
    """
    probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, own = probabilities.topk(k, -1)
    ids = own
    if given is not None:
        ids = torch.where(given == UNRECORDED, own, given.long())
        weights = probabilities.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if normalises else weights, own


def changed(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """How many tokens with recorded ids `given` (T, k) have another set of `own` ids, (), float32."""
    differs = (own.sort(-1).values != given.long().sort(-1).values).any(-1)
    return (differs & (given[:, 0] != UNRECORDED)).sum().float()


def sort_by_expert(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> Routed:
    """The rows of tokens that go to `ids` (T, k), without waiting for the device."""
    order = ids.flatten().argsort(stable=True)
    row = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(ids.flatten()[order], numbers, right=True, out_int32=True)
    return Routed(weights, order // ids.shape[1], row.view_as(ids), ends)


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
        """The gradients of prepared factors, in the order of `tensors`, as gradients of the factors themselves."""
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
    """g (M, rank), the gradient to h without the rows' weights; `grad` is dy (T, hidden), `grad_rows` (M, hidden) its
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


class _Factors(nn.Module):
    def __init__(self, a: tuple[int, ...], b: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(a, device=device))
        self.lora_B = nn.Parameter(torch.zeros(b, device=device))
        bound = 1 / math.sqrt(a[-1])  # PEFT draws A in this way
        nn.init.uniform_(self.lora_A, -bound, bound)


class ExpertAdapter(nn.Module):
    """A and B of both projections in float32, A random and B zero; `scaling` multiplies B.

    `reference` are factors that act in their place within `reference_factors`.
    """

    def __init__(
        self, sizes: tuple[int, int, int], rank: int, scaling: float, shared: bool, device: torch.device
    ) -> None:
        """`sizes` are (experts, width, hidden)."""
        super().__init__()
        experts, width, hidden = sizes
        outer = () if shared else (experts,)
        self.gate_up_proj = _Factors((*outer, rank, hidden), (experts, 2 * width, rank), device)
        self.down_proj = _Factors((experts, rank, width), (*outer, hidden, rank), device)
        self.scaling, self._acts = scaling, True
        self._reference: tuple[torch.Tensor, ...] | None = None

    def factors(self) -> ExpertFactors | None:
        """Those that act now; None if none do."""
        if self._acts:
            return ExpertFactors(*self._own(), self.scaling)
        return None if self._reference is None else ExpertFactors(*self._reference, self.scaling)

    def keep_reference(self) -> None:
        """Let the factors be the reference as they are now."""
        self._reference = tuple(factor.detach().clone() for factor in self._own())

    @contextmanager
    def reference_factors(self) -> Iterator[None]:
        """Within it the reference acts, or nothing if none was kept."""
        self._acts = False
        try:
            yield
        finally:
            self._acts = True

    def _own(self) -> tuple[torch.Tensor, ...]:
        gate_up, down = self.gate_up_proj, self.down_proj
        return gate_up.lora_A, gate_up.lora_B, down.lora_A, down.lora_B


class Experts(nn.Module):
    """The frozen weights of a layer's experts by their names in memory, (experts, 2 width, hidden) and (experts,
    hidden, width), and the adapter on them; `ExpertBlock` computes."""

    is_experts = True  # by which they are found, where a dense model never loads this module

    def __init__(self, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self.adapter: ExpertAdapter | None = None

    def factors(self) -> ExpertFactors | None:
        """The adapter's factors that act now."""
        return None if self.adapter is None else self.adapter.factors()


class ExpertBlock(nn.Module):
    """Router and experts in place of a decoder layer's MLP.

    `place` is its number among the layers that have experts. With `recorded` set to a list, each forward pass of a
    (B, S, hidden) input appends the ids that it chose, uint8 (B, S, k) on the input's device.
    """

    recorded: list[torch.Tensor] | None = None
    replays = True  # a decoder layer gives it the experts to use

    def __init__(self, router: nn.Module, experts: Experts, chosen: int, normalises: bool, place: int) -> None:
        """`router.weight` is (experts, hidden). Of its experts a token gets `chosen`."""
        super().__init__()
        self.gate, self.experts = router, experts
        self.chosen, self.normalises, self.place = chosen, normalises, place

    def forward(self, x: torch.Tensor, replay: Replay | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        dtype = product_dtype(x.device.type, self.experts.gate_up_proj.compute_dtype)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            ids, weights = self._route(rows.to(dtype), replay)
            if self.recorded is not None:
                self.recorded.append(ids.to(torch.uint8).view(*x.shape[:-1], -1))
            routed = sort_by_expert(ids, weights, self.experts.gate_up_proj.experts)
        y = experts_of(rows, self.experts, routed, self.experts.factors(), dtype)
        return y.view(*x.shape[:-1], y.shape[1])

    def _route(self, rows: torch.Tensor, replay: Replay | None) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(rows, self.gate.weight.to(rows.dtype))
        given = None if replay is None else replay.ids[:, self.place]
        ids, weights, own = choose(logits, self.chosen, self.normalises, given)
        if replay is not None:
            replay.changed[self.place] = changed(own, given)
        return ids, weights


def experts_of(
    x: torch.Tensor,
    weights: Experts,
    routed: Routed,
    lora: ExpertFactors | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y (T, hidden) of the module docstring for x (T, hidden), computed in `dtype` (default: as x)."""
    factors = () if lora is None else lora.tensors
    return _Experts.apply(x, (weights, lora, dtype or x.dtype), routed, *routed, *factors)


class _Experts(torch.autograd.Function):
    """See the module docstring."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, block: tuple, routed: Routed, *tensors: torch.Tensor) -> torch.Tensor:
        weights, lora, dtype = block
        ctx.block, ctx.x_dtype, x = (weights, lora), x.dtype, x.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            used = None if lora is None else lora.prepared(dtype)
            rows = x[routed.token]
            inner = grouped_product(rows, weights.gate_up_proj.dense(dtype).transpose(1, 2), routed.ends)
            h_gate_up = None if used is None else add_gate_up_(inner, x, rows, routed, used)
            del rows
            activation = kernels_for(x).swiglu_forward(inner)
            y_rows = grouped_product(activation, weights.down_proj.dense(dtype).transpose(1, 2), routed.ends)
            h_down = added = None
            if used is not None:
                h_down, added = add_down_(y_rows, activation, routed, used)
            y = routed.sum_of(y_rows, routed.weights)
            y = y if added is None else y.add_(added)
        ctx.save_for_backward(x, inner, h_gate_up, h_down, *tensors)
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, inner, h_gate_up, h_down, *tensors = ctx.saved_tensors
        (weights, lora), routed, grad = ctx.block, Routed(*tensors[:4]), grad.to(x.dtype)
        grads: list[torch.Tensor] = []
        with torch.autocast(grad.device.type, enabled=False):
            used = None if lora is None else lora.prepared(x.dtype)
            grad_rows = grad[routed.token]
            activation = grouped_product(grad_rows, weights.down_proj.dense(x.dtype), routed.ends)
            if used is not None:
                g = down_to_h(grad, grad_rows, routed, used)
                activation.add_(grouped_product(g, used.down_a, routed.ends))
            activation.mul_(routed.weight_of_rows())  # each row's weight: here, where rows are narrowest
            # `activation` held its own gradient until here; this call overwrites it with the activation itself.
            grad_inner = kernels_for(x).swiglu_backward_(inner, activation)
            if used is not None:
                grads = [*down_factors_backward(activation, (grad, grad_rows), h_down, g, routed, used)]
            del activation, grad_rows
            dx_rows = grouped_product(grad_inner, weights.gate_up_proj.dense(x.dtype), routed.ends)
            added = None
            if used is not None:
                da, db, added = gate_up_backward_(dx_rows, grad_inner, x, h_gate_up, routed, used)
                grads = lora.own_sizes([da, db, *grads])
            dx = routed.sum_of(dx_rows)
            dx = dx if added is None else dx.add_(added)
        return dx.to(ctx.x_dtype), None, None, None, None, None, None, *grads
