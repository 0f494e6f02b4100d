"""Rollouts through TRL's seam: TRL asks for completions as it would ask its own vLLM client, and our engine answers.

TRL 1.16 calls `sync_weights()` when the optimizer has stepped and `generate(...)` for each batch of prompts
(GRPOTrainer._generate_single_turn). Here the first hands the adapter to the engine, the second samples with the step's
noise in the norms and records what a step should know about its rollout.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qerl.checkpoint.adapter import adapter_scaling, adapter_tensors
from qerl.engine.interface import Completion, Engine, SamplingParams
from qerl.errors import EngineError
from qerl.layers.norms import block_norms, set_norm_noise_
from training.policy.train_memory import begin_phase, card_memory
from training.rollout.noise import NoiseSchedule, StepNoise, derive_seed

if TYPE_CHECKING:
    from peft import PeftModel

    from qerl.config.schema import RunConfig
    from training.rollout.grading_ahead import GradingAhead


@dataclass
class RolloutStats:
    """What the rollouts of a step cost and gave, added up; `noise` has the metrics of the noise, the same for all."""

    completions: int = 0
    graded_ahead: int = 0  # when the engine was done
    tokens: int = 0
    logprobs: float = 0.0  # their sum
    seconds: float = 0.0
    noise: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)  # empty on a CPU


class Rollout:
    """Stands where TRL's `vllm_generation` stands; `ahead` grades completions while others are sampled."""

    def __init__(self, engine: Engine, policy: PeftModel, config: RunConfig, ahead: GradingAhead | None = None) -> None:
        self._engine = engine
        self._policy = policy
        self._config = config
        self._norms = block_norms(policy) if config.noise.enabled else {}
        sizes = {name: module.weight.numel() for name, module in self._norms.items()}
        self._noise = NoiseSchedule(config.noise, sizes, config.run.steps, config.run.seed)
        self._ahead = ahead
        self.answers: Sequence[str] = ()  # to the prompts that are sampled next, for `ahead`
        self._sync_s = 0.0
        self.begin_step(0)

    def begin_step(self, step: int, history: Sequence[Mapping[str, Any]] = ()) -> None:
        """What is sampled from here on is for optimizer step `step`, which seeds it and picks the noise.

        `history` has the metrics of the steps so far, which a noise controller reads.
        """
        self._step, self._history = step, history
        self._attempt = 0  # rollouts of this step so far; dynamic sampling takes several
        self.completions: list[Completion] = []
        self._stats = RolloutStats()

    @property
    def sampling(self) -> SamplingParams:
        """The recipe's sampling parameters."""
        rollout = self._config.rollout
        return SamplingParams(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)

    def sync_weights(self) -> None:
        """Hand the adapter's tensors to the engine. Raises EngineError if not every tensor found its place."""
        started = time.perf_counter()
        tensors = adapter_tensors(self._policy)
        taken = self._engine.sync_adapter(tensors, adapter_scaling(self._policy))
        if taken != len(tensors):
            raise EngineError(f"the engine took {taken} of the adapter's {len(tensors)} tensors: they do not fit it")
        self._sync_s = time.perf_counter() - started

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: None,
        num_generations: int,
        profiler: AbstractContextManager,
    ) -> tuple[Sequence[Sequence[int]], list[list[int]], list[list[list[float]]], None]:
        """TRL's signature: (prompt ids, completion ids, logprobs with one candidate a token, None), a row a prompt.

        `prompts` holds each prompt once for each of its `num_generations` completions already.
        """
        noise = self._noise.at(self._step, self._history)
        ahead = nullcontext() if self._ahead is None else self._ahead.rollout(self.answers)
        with profiler, ahead as finished:
            self._engine.wake()
            begin_phase()
            started = time.perf_counter()  # waking and sleeping are no sampling
            touched = self._set_noise(noise)
            purpose = f"rollout/{self._attempt}" if self._attempt else "rollout"
            seed = derive_seed(self._config.run.seed, self._step, purpose)
            self.completions = self._engine.generate(prompts, self.sampling, seed, finished)
            self._count(noise, touched, time.perf_counter() - started)
            self._after_rollout(noise)
        self._attempt += 1
        return (
            prompts,
            [completion.token_ids for completion in self.completions],
            [[[logprob] for logprob in completion.logprobs] for completion in self.completions],
            None,
        )

    def clear_noise(self) -> None:
        """Clean norms in engine and policy, bit-exactly."""
        self._engine.set_noise(None)
        set_norm_noise_(self._norms, None)

    def _set_noise(self, noise: StepNoise) -> int:
        self.clear_noise()
        if noise.vectors is None:
            return 0
        touched = self._engine.set_noise(noise.vectors)
        if touched != len(noise.vectors):
            raise EngineError(f"noise reached {touched} of {len(noise.vectors)} norms of the engine")
        return touched

    def _after_rollout(self, noise: StepNoise) -> None:
        self.clear_noise()
        if self._config.noise.where == "both" and noise.vectors is not None:
            set_norm_noise_(self._norms, noise.vectors)  # the loss sees the policy that sampled
        self._stats.memory = card_memory("memory/rollout_card_gib", self._stats.memory)
        self._engine.sleep()

    def _count(self, noise: StepNoise, touched: int, seconds: float) -> None:
        """Add the latest rollout to the step's."""
        stats = self._stats
        stats.completions += len(self.completions)
        stats.graded_ahead += self._ahead.graded if self._ahead is not None else 0
        stats.tokens += sum(len(completion.token_ids) for completion in self.completions)
        stats.logprobs += sum(sum(completion.logprobs) for completion in self.completions)
        stats.seconds += seconds
        stats.noise = {
            "noise/stage": noise.stage,
            "noise/sigma": noise.sigma,
            "noise/std": noise.std,
            "noise/norms": touched,
            **noise.controlled,
        }

    def metrics(self) -> dict[str, float]:
        """Those of the step so far, over all of its rollouts."""
        stats = self._stats
        ahead = {"speed/graded_ahead_share": stats.graded_ahead / stats.completions} if self._ahead is not None else {}
        return {
            **ahead,
            **stats.noise,
            **stats.memory,
            # The mean surprise of what was drawn estimates the entropy of the policy that drew it, with its noise.
            "sampling/entropy": -stats.logprobs / stats.tokens,
            "time/rollout_s": stats.seconds,
            "time/sync_s": self._sync_s,
            "speed/rollout_tokens_per_s": stats.tokens / stats.seconds,
        }
