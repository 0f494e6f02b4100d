"""The experts of a decoder layer, y = sum over a token's experts of w_e down_e(silu(gate_e(x)) * up_e(x)), as one node.

Tokens are sorted by expert, and each projection is one grouped product over all of them (`qerl.model.grouped`), with
the weights of all experts of the layer decoded for it and freed again. As in `qerl.model.mlp` only x, gate, up and the
small products of the adapter are kept; the backward pass computes the input of `down` again. The sum over a token's
experts is float32, and rounded once.

The gradient goes to x and to the adapter's factors (`qerl.model.expert_lora`). The router is frozen, and its weights
count as constants (`qerl.model.routing`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.formats.experts import ExpertWeights
from qerl.model import expert_lora
from qerl.model.elementwise import kernels_for
from qerl.model.expert_adapter import ExpertAdapter
from qerl.model.expert_lora import ExpertFactors
from qerl.model.grouped import grouped_product
from qerl.model.routing import Replay, Routed, changed, choose, sort_by_expert


@dataclass(frozen=True)
class Weights:
    """The frozen weights of a layer's experts, (experts, 2 width, hidden) and (experts, hidden, width)."""

    gate_up: ExpertWeights
    down: ExpertWeights


class Experts(nn.Module):
    """The weights of a layer's experts by their names in memory, and the adapter on them; `ExpertBlock` computes."""

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

    def __init__(self, router: nn.Module, experts: Experts, chosen: int, normalises: bool, place: int) -> None:
        """`router.weight` is (experts, hidden). Of its experts a token gets `chosen`."""
        super().__init__()
        self.gate, self.experts = router, experts
        self.chosen, self.normalises, self.place = chosen, normalises, place

    def forward(self, x: torch.Tensor, replay: Replay | None = None) -> torch.Tensor:
        rows, dtype = x.reshape(-1, x.shape[-1]), self._dtype(x)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            ids, weights = self._route(rows.to(dtype), replay)
            if self.recorded is not None:
                self.recorded.append(ids.to(torch.uint8).view(*x.shape[:-1], -1))
            routed = sort_by_expert(ids, weights, self.experts.gate_up_proj.experts)
        held = Weights(self.experts.gate_up_proj, self.experts.down_proj)
        y = experts_of(rows, held, routed, self.experts.factors(), dtype)
        return y.view(*x.shape[:-1], y.shape[1])

    def _route(self, rows: torch.Tensor, replay: Replay | None) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(rows, self.gate.weight.to(rows.dtype))
        given = None if replay is None else replay.ids[:, self.place]
        ids, weights, own = choose(logits, self.chosen, self.normalises, given)
        if replay is not None:
            replay.changed[self.place] = changed(own, given)
        return ids, weights

    def _dtype(self, x: torch.Tensor) -> torch.dtype:
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.experts.gate_up_proj.compute_dtype


def experts_of(
    x: torch.Tensor,
    weights: Weights,
    routed: Routed,
    lora: ExpertFactors | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y (T, hidden) of the module docstring for x (T, hidden), computed in `dtype` (default: that of x)."""
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
            inner = grouped_product(rows, weights.gate_up.dense(dtype).transpose(1, 2), routed.ends)
            h_gate_up = None if used is None else expert_lora.add_gate_up_(inner, x, rows, routed, used)
            del rows
            activation = kernels_for(x).swiglu_forward(inner)
            y_rows = grouped_product(activation, weights.down.dense(dtype).transpose(1, 2), routed.ends)
            h_down = added = None
            if used is not None:
                h_down, added = expert_lora.add_down_(y_rows, activation, routed, used)
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
            activation = grouped_product(grad_rows, weights.down.dense(x.dtype), routed.ends)
            if used is not None:
                g = expert_lora.down_to_h(grad, grad_rows, routed, used)
                activation.add_(grouped_product(g, used.down_a, routed.ends))
            activation.mul_(routed.weight_of_rows())  # each row's weight: here, where rows are narrowest
            # `activation` held its own gradient until here; this call overwrites it with the activation itself.
            grad_inner = kernels_for(x).swiglu_backward_(inner, activation)
            if used is not None:
                grads = [*expert_lora.down_factors_backward(activation, (grad, grad_rows), h_down, g, routed, used)]
            del activation, grad_rows
            dx_rows = grouped_product(grad_inner, weights.gate_up.dense(x.dtype), routed.ends)
            added = None
            if used is not None:
                da, db, added = expert_lora.gate_up_backward_(dx_rows, grad_inner, x, h_gate_up, routed, used)
                grads = lora.own_sizes([da, db, *grads])
            dx = routed.sum_of(dx_rows)
            dx = dx if added is None else dx.add_(added)
        return dx.to(ctx.x_dtype), None, None, None, None, None, None, *grads
