"""Importance weights for completions that were not sampled by the trained policy itself, and how far the two differ.

The engine samples with its own kernels and, under noise, from a perturbed policy. So each token's loss is weighted by
r = exp(old_logprobs - sampling_logprobs), truncated or masked. (arXiv 2510.11696 has no correction. The modes are those
of TRL 1.16's GRPOTrainer, and the tests compare with its values.)

tests/training/test_exact_gradient.py shows on a case small enough to enumerate what the weights achieve. With one ratio
per sequence the expected gradient is exactly the clean policy's, up to what the cap cuts off. One ratio per token
is the default, since its variance does not grow with the length. A bias remains then, smaller than without weights,
because prefixes and continuations keep the distribution of the sampler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from qerl.config.schema import CorrectionConfig
    from qerl.model.experts import Replay


def importance_weights(
    old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor:
    """Weights for the loss of each token: (B, T) in the token modes, (B, 1) in the sequence modes.

    All three tensors are (B, T); `mask` is 1 on completion tokens. "truncate" clamps the ratio to [floor, cap],
    "mask" sets a ratio outside of it to 0.
    """
    ratio = _ratio(old_logprobs, sampling_logprobs, mask, config)
    if config.mode.endswith("truncate"):
        return ratio.clamp(config.floor or 0.0, config.cap)
    return ratio.masked_fill(_is_outside(ratio, config), 0.0)


def _ratio(
    old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor:
    """exp(old_logprobs - sampling_logprobs) of each token (B, T), or their product over each sequence (B, 1)."""
    difference = (old_logprobs - sampling_logprobs) * mask
    if config.mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    return difference.exp()


def _is_outside(ratio: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    return (ratio > config.cap) | (ratio < (config.floor or 0.0))


def mean_k3(logprobs: torch.Tensor, before: torch.Tensor, mask: torch.Tensor) -> float:
    """mean(r - log r - 1) over the tokens of `mask`, r = exp(logprobs - before), in nats; all are (B, T).

    It estimates KL(before || now), where the policy `before` drew the tokens (k3 of joschu.net/blog/kl-approx.html).
    """
    difference = (logprobs - before) * mask
    return ((difference.exp() - difference - 1).sum() / mask.sum().clamp(min=1)).item()


@dataclass
class Mismatch:
    """Sums over the tokens of a step, which `metrics` turns into means."""

    tokens: float = 0.0
    abs_difference: float = 0.0
    kl: float = 0.0
    max_difference: float = 0.0
    weights: float = 0.0
    squared_weights: float = 0.0
    outside: float = 0.0
    choices: float = 0.0  # of experts, by a layer for a token, that the engine recorded
    changed_choices: float = 0.0  # of these, the ones that the trainer would make otherwise

    def add(
        self, old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
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
        self.max_difference = _larger(self.max_difference, difference.abs().max().item())
        if config.mode == "off":
            weights = ratio
        else:
            weights = importance_weights(old_logprobs, sampling_logprobs, mask, config)
            weights = weights.expand_as(mask).double()[inside]
            outside = _is_outside(_ratio(old_logprobs, sampling_logprobs, mask, config), config)
            self.outside += (outside.expand_as(mask) & inside).sum().item()
        self.weights += weights.sum().item()
        self.squared_weights += weights.square().sum().item()

    def add_replay(self, replay: Replay) -> None:
        """Count the choices of one forward pass."""
        self.choices += replay.choices
        self.changed_choices += replay.changed.sum().item()

    def merge(self, other: Mismatch) -> None:
        """Count what `other` has counted."""
        largest = _larger(self.max_difference, other.max_difference)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.max_difference = largest

    @property
    def mean_kl(self) -> float:
        """mean(r - log r - 1) over the tokens, in nats."""
        return self.kl / max(self.tokens, 1.0)

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2), which is 1 if all weights are equal.

        w are the weights after truncation or masking; with the correction off, the plain ratios of the tokens.
        """
        return self.weights**2 / (self.tokens * self.squared_weights) if self.squared_weights else 0.0

    def metrics(self, config: CorrectionConfig) -> dict[str, float]:
        """The metrics of the step. The share of tokens outside the bounds is named after what happened to them."""
        if not self.tokens:
            return {}
        means = {
            "mismatch_kl": self.mean_kl,
            "mismatch/mean_abs": self.abs_difference / self.tokens,
            "mismatch/max_abs": self.max_difference,
            "correction/ess": self.ess,
        }
        if self.choices:
            means["mismatch/router_changed"] = self.changed_choices / self.choices
        if config.mode == "off":
            return means
        fate = "correction/capped_share" if config.mode.endswith("truncate") else "correction/masked_share"
        return means | {"correction/mean_weight": self.weights / self.tokens, fate: self.outside / self.tokens}


def _larger(one: float, other: float) -> float:
    """The larger number, or NaN if either is one, which `max` may hide."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
