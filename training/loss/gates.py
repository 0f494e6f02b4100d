"""What stops a run before a bad update or a bad checkpoint.

Engine and trainer may disagree on the logprobs of the same tokens before the first update (`MismatchGate`), and a loss,
a gradient or trained weights may not be finite.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qerl.base.errors import EngineError

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel
    from qerl.config.schema import RunConfig
    from training.loss.correction import Mismatch


logger = logging.getLogger(__name__)

GROWTH = 5.0  # how much larger the mismatch of one noise draw may be than another's
LEAST_MOVED = 0.02  # nats per token: a trial that changes less cannot be told from rounding


@dataclass(frozen=True)
class Trial:
    """Logprobs (M,), float64, of tokens that the engine sampled with a trial adapter (`training.trial_adapter`)."""

    engine: torch.Tensor  # at sampling
    trainer: torch.Tensor  # with the trial adapter
    without: torch.Tensor  # the trainer's with B = 0

    @property
    def moved(self) -> float:
        """By how many nats per token the trial adapter moves the trainer."""
        return (self.trainer - self.without).abs().mean().item()

    @property
    def share(self) -> float:
        """How much of that change the engine has: 1 if it samples as the trainer computes, 0 if as with B = 0."""
        return self._slope[0]

    @property
    def idle(self) -> bool:
        """Whether the engine, by two standard errors, has less than half of the change, and is nearer to B = 0."""
        share, error = self._slope
        nearer = k3(self.without, self.engine).mean() < k3(self.trainer, self.engine).mean()
        return bool(nearer) and share + 2 * error < 0.5

    @property
    def mean_kl(self) -> float:
        """The mismatch_kl of engine and trainer."""
        return k3(self.trainer, self.engine).mean().item()

    @property
    def least_kl(self) -> float:
        """The same less two standard errors, since the tokens are few."""
        return self.mean_kl - 2 * k3(self.trainer, self.engine).std(correction=0).item() / len(self.engine) ** 0.5

    @property
    def _slope(self) -> tuple[float, float]:
        """Of the engine's change by the trainer's, by least squares, and its standard error."""
        change, own = self.trainer - self.without, self.engine - self.without
        share = (own @ change) / (change @ change)
        rest = (own - share * change).square().sum() / max(1, len(own) - 1)
        return share.item(), (rest / (change @ change)).sqrt().item()


def k3(logprobs: torch.Tensor, sampling: torch.Tensor) -> torch.Tensor:
    """r - log r - 1 of each token, r = exp(logprobs - sampling)."""
    difference = logprobs - sampling
    return difference.exp() - difference - 1


class MismatchGate:
    """Judges the first step of a run that can be judged; after that it is `passed`."""

    def __init__(self, limit: float | None, dropout: float, causes: Sequence[str] = ()) -> None:
        """`limit` is in nats, or None for no gate. If the old logprobs have the adapter's `dropout`, no step can be
        judged.

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
        if reason := self._why_they_differ(sigma, older):
            known = None if self._dropout or self._told else _largest_kl(history, sigma)
            if known is None:
                self._tell(reason)
                return
            if GROWTH * known > limit:
                limit, name = GROWTH * known, f"{GROWTH:g} times what the run had with that much noise"
        if not mismatch.mean_kl <= limit:  # NaN is not below it either
            raise EngineError(
                f"engine and trainer disagree before the first update: mismatch_kl {mismatch.mean_kl:.2e} is above "
                f"{name}. {self._advice}"
            )
        self.passed = True

    def check_trial(self, trial: Trial) -> None:
        """Judge a trial adapter, before the first step. Raises EngineError if a run should not begin with it."""
        if trial.moved < LEAST_MOVED:
            logger.warning(
                "loss.mismatch_gate: whether the engine reads its adapter was not checked: no trial B moves the "
                "trainer's logprobs (%.1e nats per token); watch mismatch_kl in metrics.jsonl",
                trial.moved,
            )
            return
        if trial.idle:
            raise EngineError(
                f"the adapter does not act in the engine: a trial B moves the trainer's logprobs by {trial.moved:.2g} "
                f"nats per token, of which the engine shows {100 * trial.share:.0f}%, so it would go on sampling from "
                "the base while the trainer trains. Install the versions that qerl was tested with (requirements/), or "
                "write rollout.engine: transformers; loss.mismatch_gate: null begins without this check"
            )
        if not trial.least_kl <= self._limit:  # NaN is not below it either
            raise EngineError(
                f"engine and trainer disagree under a trial adapter: mismatch_kl {trial.mean_kl:.2e} is above "
                f"loss.mismatch_gate {self._limit:g}. {self._advice}"
            )

    def _why_they_differ(self, sigma: float, older: bool) -> str | None:
        """What makes the two policies differ even where their logprobs agree; None if nothing does."""
        if sigma:
            return f"its noise (sigma {sigma:g})"
        if self._dropout:
            return f"the adapter's dropout ({self._dropout:g})"
        return "what it carried over" if older else None

    @property
    def _advice(self) -> str:
        if self._causes:
            return (
                f"{' and '.join(self._causes)} lets them round differently: leave it out, or raise the gate if "
                "importance weights are meant to correct for so much"
            )
        return (
            "Check that both loaded the same base, that the adapter was synced and that top_p is 1; raise the gate "
            "only if the difference is known"
        )

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
    if config.train.fp8_recipe is not None and config.train.fp8[1] == "all":
        found.append(f"train.fp8_recipe: {config.train.fp8_recipe}")
    if config.rollout.kv_cache_dtype != "auto":
        found.append(f"rollout.kv_cache_dtype: {config.rollout.kv_cache_dtype}")
    return found


def _largest_kl(history: Sequence[Mapping[str, Any]], sigma: float) -> float | None:
    """The largest mismatch_kl among the steps with the smallest sigma that is not below `sigma`; None without such."""
    rows = [row for row in history if row.get("mismatch_kl") is not None and row.get("noise/sigma", 0.0) >= sigma]
    least = min((row["noise/sigma"] for row in rows), default=None)
    return max((row["mismatch_kl"] for row in rows if row["noise/sigma"] == least), default=None)


def check_finite(value: float | None, what: str, step: int, run_dir: Path) -> None:
    """Raise EngineError if the loss of a step, or the norm of its gradient, is NaN or infinite."""
    if value is not None and not math.isfinite(value):
        raise _broken(f"the {what} of step {step} is {value}", run_dir)


def check_trained(parameters: Iterable[torch.Tensor], step: int, run_dir: Path, parallel: Parallel) -> None:
    """Raise EngineError, on every rank, if a trained parameter of any of them holds NaN or infinity.

    Called before a checkpoint is written, so that each one can be resumed from.
    """
    bounds = [bound.float() for parameter in parameters for bound in parameter.detach().aminmax()]
    if not all(parallel.gather(not bounds or bool(torch.stack(bounds).isfinite().all()))):
        raise _broken(f"the update of step {step} left NaN or infinity in what is trained, and is not saved", run_dir)


def _broken(what: str, run_dir: Path) -> EngineError:
    return EngineError(
        f"{what}: lower optim.learning_rate or optim.max_grad_norm, and resume from the last checkpoint in {run_dir}"
    )
