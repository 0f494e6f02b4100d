"""Which experts a token goes to and with what weight, and the tokens sorted by expert.

The weights are those of vLLM 0.25.1: a softmax in float32 over the router's logits, the k largest of it, divided by
their sum where the model does so, and kept in float32 (transformers rounds them to 16 bits). The router is frozen, and
no gradient goes through the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from qerl.model.saved import UNRECORDED


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
            from qerl.model.expert_kernels import sum_of_rows

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

    `given` (T, k) are ids to use instead of the k largest; the weights at them are those of these logits.
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
