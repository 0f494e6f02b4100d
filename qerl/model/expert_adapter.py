"""The trained factors on the experts of a layer, as parameters; `qerl.model.expert_lora` has their shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qerl.model.expert_lora import ExpertFactors

KINDS = ("shared", "per_expert", "none")  # of adapter.experts


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
