"""Importance weights for completions that another policy sampled than the one that is trained, and the mismatch.

The engine samples with its own kernels and, with noise, from a perturbed policy. Each token's loss is weighted by
r = exp(old_logprobs - sampling_logprobs), truncated or masked (arXiv 2510.11696 has no correction; the modes are those
of TRL 1.16's GRPOTrainer, whose values the tests compare with).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from qerl.config import CorrectionConfig


def importance_weights(
    old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor:
    """Weights for the per-token loss: (B, T) in the token modes, (B, 1) in the sequence modes.

    All three tensors are (B, T); `mask` is 1 on completion tokens. "truncate" clamps the ratio to [floor, cap], "mask"
    sets a ratio outside it to 0.
    """
    difference = (old_logprobs - sampling_logprobs) * mask
    if config.mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    floor = 0.0 if config.floor is None else config.floor
    if config.mode.endswith("truncate"):
        return ratio.clamp(floor, config.cap)
    return ratio.masked_fill((ratio < floor) | (ratio > config.cap), 0.0)


@dataclass
class Mismatch:
    """Sums over the tokens of a step; `metrics` turns them into means."""

    tokens: float = 0.0
    abs_difference: float = 0.0
    kl: float = 0.0
    max_difference: float = 0.0
    weights: float = 0.0
    squared_weights: float = 0.0
    outside: float = 0.0

    def add(
        self,
        old_logprobs: torch.Tensor,
        sampling_logprobs: torch.Tensor,
        mask: torch.Tensor,
        config: CorrectionConfig,
    ) -> None:
        """Count one micro-batch of (B, T) tensors."""
        inside = mask.bool()
        if not inside.any():
            return
        difference = (old_logprobs - sampling_logprobs).double()[inside]
        ratio = difference.exp()
        self.tokens += difference.numel()
        self.abs_difference += difference.abs().sum().item()
        self.kl += (ratio - difference - 1).sum().item()
        self.max_difference = max(self.max_difference, difference.abs().max().item())
        if config.mode == "off":
            weights = ratio
        else:
            weights = importance_weights(old_logprobs, sampling_logprobs, mask, config)
            weights = weights.expand_as(mask).double()[inside]
            self.outside += _outside(old_logprobs, sampling_logprobs, mask, config)
        self.weights += weights.sum().item()
        self.squared_weights += weights.square().sum().item()

    @property
    def mean_kl(self) -> float:
        """mean(r - log r - 1) over the tokens, in nats."""
        return self.kl / max(self.tokens, 1.0)

    @property
    def ess(self) -> float:
        """Effective sample size, as a share of the tokens: (sum w)^2 / (n sum w^2), 1 where all weigh the same.

        w are the weights that act, after truncation or masking; with the correction off, the tokens' plain ratios.
        """
        return self.weights**2 / (self.tokens * self.squared_weights) if self.squared_weights else 0.0

    def metrics(self, config: CorrectionConfig) -> dict[str, float]:
        """The step's metrics; the share outside the bounds is named after what happened to it."""
        if not self.tokens:
            return {}
        means = {
            "mismatch_kl": self.mean_kl,
            "mismatch/mean_abs": self.abs_difference / self.tokens,
            "mismatch/max_abs": self.max_difference,
            "correction/ess": self.ess,
        }
        if config.mode == "off":
            return means
        fate = "correction/capped_share" if config.mode.endswith("truncate") else "correction/masked_share"
        return means | {"correction/mean_weight": self.weights / self.tokens, fate: self.outside / self.tokens}


def _outside(
    old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> float:
    """How many tokens have a ratio (their own or their sequence's) outside [floor, cap]."""
    difference = (old_logprobs - sampling_logprobs) * mask
    if config.mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    outside = (ratio > config.cap) | (ratio < (0.0 if config.floor is None else config.floor))
    return (outside.expand_as(mask) & mask.bool()).sum().item()
