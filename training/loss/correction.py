"""Importance weights for completions that were not sampled by the trained policy itself, and the mismatch.

The engine samples with its own kernels and, under noise, from a perturbed policy. So each token's loss is weighted by
r = exp(old_logprobs - sampling_logprobs), truncated or masked. (arXiv 2510.11696 has no correction. The modes are those
of TRL 1.16's GRPOTrainer, and the tests compare with its values.)

tests/training/test_exact_gradient.py shows on a case small enough to enumerate what the weights achieve. With one ratio
per sequence the expected gradient is exactly that of the clean policy, up to what the cap cuts off. One ratio per token
is the default, since its variance does not grow with the length. A bias remains then, smaller than without weights,
because prefixes and continuations keep the distribution of the sampler.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from qerl.errors import EngineError

if TYPE_CHECKING:
    from qerl.config.schema import CorrectionConfig, RunConfig
    from qerl.layers.routing import Replay

logger = logging.getLogger(__name__)

GROWTH = 5.0  # how much larger the mismatch of one noise draw may be than that of another


def importance_weights(
    old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor:
    """Weights for the loss of each token: (B, T) in the token modes, (B, 1) in the sequence modes.

    All three tensors are (B, T); `mask` is 1 on completion tokens. "truncate" clamps the ratio to [floor, cap],
    "mask" sets a ratio outside of it to 0.
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
        largest = [self.max_difference, difference.abs().max().item()]
        self.max_difference = torch.tensor(largest, dtype=torch.float64).max().item()  # max() would hide a NaN
        if config.mode == "off":
            weights = ratio
        else:
            weights = importance_weights(old_logprobs, sampling_logprobs, mask, config)
            weights = weights.expand_as(mask).double()[inside]
            self.outside += _outside(old_logprobs, sampling_logprobs, mask, config)
        self.weights += weights.sum().item()
        self.squared_weights += weights.square().sum().item()

    def add_replay(self, replay: Replay) -> None:
        """Count the choices of one forward pass."""
        self.choices += replay.choices
        self.changed_choices += replay.changed.sum().item()

    def merge(self, other: Mismatch) -> None:
        """Count what `other` has counted."""
        largest = [self.max_difference, other.max_difference]
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.max_difference = torch.tensor(largest, dtype=torch.float64).max().item()

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


class MismatchGate:
    """Stop a run before its first update if engine and trainer disagree on their logprobs."""

    def __init__(self, limit: float | None, dropout: float, causes: Sequence[str] = ()) -> None:
        """`limit` is in nats, or None for no gate. If the adapter has `dropout`, no step can be judged.

        `causes` are what the recipe asks for that makes them differ from the first step on (`rounding_causes`).
        """
        self._limit, self._dropout, self._causes = limit, dropout, causes
        self.passed = limit is None
        self._told = False

    def check(
        self, mismatch: Mismatch, sigma: float, history: Sequence[Mapping[str, Any]] = (), older: bool = False
    ) -> None:
        """Judge a step before its update. Raises EngineError if the mismatch is above the limit.

        Noise and dropout make the two policies differ even where their logprobs agree. A run that is resumed at a noisy
        step has no clean step to be judged by, so its limit is GROWTH times the largest mismatch that its `history`
        (the metrics of its steps) has with as much noise. So has one in which an `older` policy drew tokens. A step
        without tokens in the loss is not judged.
        """
        if self.passed or not mismatch.tokens:
            return
        limit, name = self._limit, f"loss.mismatch_gate {self._limit:g}"
        if sigma or self._dropout or older:
            known = None if self._dropout or self._told else _largest_kl(history, sigma)
            if known is None:
                dropout = f"the adapter's dropout ({self._dropout:g})" if self._dropout else "what it carried over"
                self._tell(f"its noise (sigma {sigma:g})" if sigma else dropout)
                return
            if GROWTH * known > limit:
                limit, name = GROWTH * known, f"{GROWTH:g} times what the run had with that much noise"
        if not mismatch.mean_kl <= limit:
            if self._causes:
                keys = " and ".join(self._causes)
                raise EngineError(
                    f"engine and trainer disagree before the first update: mismatch_kl {mismatch.mean_kl:.2e} is above "
                    f"{name}. {keys} lets them round differently: leave it out, or raise the gate if importance "
                    "weights are meant to correct for so much"
                )
            raise EngineError(
                f"engine and trainer disagree before the first update: mismatch_kl {mismatch.mean_kl:.2e} is "
                f"above {name}. Check that both loaded the same base, that the adapter was "
                "synced and that top_p is 1; raise the gate only if the difference is known"
            )
        self.passed = True

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "loss.mismatch_gate is not checked at this run's first step: %s makes sampler and trainer differ; "
                "watch mismatch_kl in metrics.jsonl",
                reason,
            )


def rounding_causes(config: RunConfig) -> list[str]:
    """The keys of a recipe that let the trainer compute otherwise than the engine, or round what differs in last bits.

    Empty if the two should agree.
    """
    found = []
    if config.qat is not None:
        if config.qat.forward == "masters":
            found.append("qat.forward: masters")
        if config.qat.quant_cfg.activations != "none":
            found.append(f"qat.quant_cfg.activations: {config.qat.quant_cfg.activations}")
    if config.train.fp8_recipe is not None:
        found.append(f"train.fp8_recipe: {config.train.fp8_recipe}")
    if config.rollout.kv_cache_dtype != "auto":
        found.append(f"rollout.kv_cache_dtype: {config.rollout.kv_cache_dtype}")
    return found


def _largest_kl(history: Sequence[Mapping[str, Any]], sigma: float) -> float | None:
    """The largest mismatch_kl among the steps with the smallest sigma that is not below `sigma`; None without such."""
    rows = [row for row in history if row.get("mismatch_kl") is not None and row.get("noise/sigma", 0.0) >= sigma]
    least = min((row["noise/sigma"] for row in rows), default=None)
    return max((row["mismatch_kl"] for row in rows if row["noise/sigma"] == least), default=None)


def _outside(
    old_logprobs: torch.Tensor, sampling_logprobs: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> float:
    """The number of tokens whose ratio (their own, or their sequence's) is outside [floor, cap]."""
    difference = (old_logprobs - sampling_logprobs) * mask
    if config.mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    outside = (ratio > config.cap) | (ratio < (0.0 if config.floor is None else config.floor))
    return (outside.expand_as(mask) & mask.bool()).sum().item()
