"""Prompts -> groups of completions: how they are asked, and one rollout on the engine with noise in its norms.

`Asking` is the one call of an engine for a step, a validation and an evaluation. `training/rollout/prompts.py` reads
what is asked, and `training/rewards/grading.py` grades what is answered.

The engine shares its weights with the policy that trains, so a sync sends the policy's update alone. The noise is set
before sampling and removed exactly afterwards; with `noise.where: both` it is set in the policy as well, so that the
loss sees the policy that sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from qerl.base.errors import EngineError
from qerl.base.philox import derive_seed
from qerl.engine.interface import Engine, Finished, SamplingParams
from qerl.engine.update import deliver
from qerl.model.norms import noise_norms, set_norm_noise_
from training.loss.groups import Group, Prompt, Sample, grouped
from training.policy.train_memory import begin_phase, card_memory
from training.rollout.noise import NoiseSchedule, StepNoise

if TYPE_CHECKING:
    import torch

    from qerl.config.noise import NoiseConfig
    from qerl.episodes.driven import Episode
    from qerl.episodes.play import Environments
    from training.policy.kv_ranges import KVCalibration
    from training.policy.policy import Policy
    from training.rollout.carry_over import Kept, Pool

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """The groups that one call of the engine gave, and what it cost."""

    groups: list[Group]
    seconds: float  # of sampling alone
    switch_s: float  # of waking the engine and of putting it to sleep
    noise: Mapping[str, float]
    memory: Mapping[str, float]  # empty on a CPU
    kept: Kept | None = None  # what goes on in the next rollout; None where nothing is carried over
    drawn_tokens: int | None = None  # if `groups` has others


def environment_seed(seed: int, row: int) -> int:
    """The seed of an environment. Episodes of one row begin alike."""
    return derive_seed(seed, row, "environment")


@dataclass(frozen=True)
class Asking:
    """How prompts are asked: `size` completions of each, or as many episodes with `environments`."""

    sampling: SamplingParams
    size: int = 1
    environments: Environments | None = None
    environment_seed: Callable[[int, int], int] = environment_seed  # of the call's seed and a prompt's row

    def groups(
        self, engine: Engine, prompts: Sequence[Prompt], seed: int, first: int = 0, told: Finished | None = None
    ) -> list[Group]:
        """A group for each prompt. `first` is the place of the first one among all that are asked with this seed, of
        which other ranks ask the rest; `told` is called as each completion, or turn of an episode, ends."""
        each = [prompt for prompt in prompts for _ in range(self.size)]
        if not each:
            return []
        if self.environments is None:
            done = engine.generate([prompt.ids for prompt in each], self.sampling, seed, told, first * self.size)
            return grouped(prompts, [Sample.of(completion) for completion in done], self.size)
        starts = [
            self.environments.start(one.example, one.messages, one.ids, self.environment_seed(seed, one.row))
            for one in each
        ]
        episodes = self.environments.play(engine, starts, self.sampling, seed, told)
        return grouped(prompts, [Sample.of_episode(episode) for episode in episodes], self.size)


class Sampler:
    """Samples for a run."""

    calibration: KVCalibration | None = None  # of an engine whose keys and values have 8 bits

    def __init__(
        self, engine: Engine, policy: Policy, asking: Asking, noise: NoiseConfig, steps: int, seed: int
    ) -> None:
        """`steps` counts the whole run, over which the noise falls."""
        self._engine, self._policy, self._asking, self._seed = engine, policy, asking, seed
        self._noise_in_policy = noise.where == "both"
        self._norms = noise_norms(policy.base_model) if noise.enabled else {}
        sizes = {name: module.weight.numel() for name, module in self._norms.items()}
        self._noise = NoiseSchedule(noise, sizes, steps, seed)
        self._in_policy: Mapping[str, torch.Tensor] | None = None  # noise that stays while the policy trains

    def sync(self, step: int) -> float:
        """Send the policy's update to the engine, for what it samples at `step`; returns seconds.

        Keys and values in 8 bits are calibrated if that is due. Raises EngineError unless the update finds its place.
        """
        started = time.perf_counter()
        deliver(self._policy.update(), self._engine)
        if (shards := self._policy.shards) is not None:
            shards.send_packed_()
        if self.calibration is not None:
            self.calibration.after_sync(self._engine, step)
        return time.perf_counter() - started

    def sample(self, prompts: Sequence[Prompt], step: int, attempt: int = 0, first: int = 0) -> Rollout:
        """A group for each prompt. `attempt` counts the rollouts of a step, each of which has seeds of its own.

        `first` is the place of the first prompt in the whole rollout, of which other ranks sample the rest.
        """
        groups, cost = self._drawn(step, attempt, lambda seed: self._asking.groups(self._engine, prompts, seed, first))
        return Rollout(groups, **cost)

    def go_on(self, pool: Pool, step: int) -> Rollout:
        """A rollout that goes on with what is in `pool`, and ends as soon as that has groups enough."""

        def draw(seed: int) -> tuple[list[Group], Kept]:
            return pool.settle(self._engine.run(pool, seed))

        (groups, kept), cost = self._drawn(step, 0, draw)
        return Rollout(groups, kept=kept, drawn_tokens=pool.drawn_tokens, **cost)

    @property
    def sampling(self) -> SamplingParams:
        """How completions are sampled."""
        return self._asking.sampling

    def _drawn(self, step: int, attempt: int, draw: Callable[[int], T]) -> tuple[T, dict[str, Any]]:
        """What `draw(seed)` gives on the engine with the step's noise, and what it cost by the fields of Rollout."""
        noise, asked = self._noise.at(step), time.perf_counter()
        self._engine.wake()
        begin_phase()
        started = time.perf_counter()
        touched = self._set_noise(noise)
        drawn = draw(derive_seed(self._seed, step, f"rollout/{attempt}" if attempt else "rollout"))
        seconds = time.perf_counter() - started
        self.clear_noise()
        if self._noise_in_policy and noise.vectors is not None:
            self._set_policy_noise(noise.vectors)
        memory, ended = card_memory("memory/rollout_card_gib"), time.perf_counter()
        self._engine.sleep()
        shown = {"noise/stage": noise.stage, "noise/sigma": noise.sigma, "noise/std": noise.std}
        return drawn, {
            "seconds": seconds,
            "switch_s": started - asked + time.perf_counter() - ended,
            "noise": shown | {"noise/norms": touched},
            "memory": memory,
        }

    @contextmanager
    def clean_engine(self) -> Iterator[Engine]:
        """The engine, awake, with clean norms in it and in the policy. The policy's noise is put back afterwards."""
        noise = self._in_policy
        self._engine.wake()
        self.clear_noise()
        try:
            yield self._engine
            self._engine.sleep()  # not after an error: the engine may be in the midst of a rollout
        finally:
            self._set_policy_noise(noise)

    def clear_noise(self) -> None:
        """Clean norms in engine and policy, bit-exactly."""
        self._engine.set_noise(None)
        self._set_policy_noise(None)

    def _set_policy_noise(self, noise: Mapping[str, torch.Tensor] | None) -> None:
        set_norm_noise_(self._norms, noise)
        self._in_policy = noise

    def _set_noise(self, noise: StepNoise) -> int:
        self.clear_noise()
        if noise.vectors is None:
            return 0
        touched = self._engine.set_noise(noise.vectors)
        if touched != len(noise.vectors):
            raise EngineError(f"noise reached {touched} of {len(noise.vectors)} norms of the engine")
        return touched


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of a step over all of its rollouts."""
    samples = [sample for rollout in rollouts for group in rollout.groups for sample in group.samples]
    tokens = sum(sample.written for sample in samples)
    drawn = sum(rollout.drawn_tokens for rollout in rollouts) if rollouts[0].kept is not None else tokens
    seconds = sum(rollout.seconds for rollout in rollouts)
    surprise = -sum(sum(sample.logprobs) for sample in samples)  # tokens of environments have a logprob of 0
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    memory = {name: max(rollout.memory[name] for rollout in rollouts) for name in rollouts[0].memory}
    return {
        **rollouts[-1].noise,
        **(episode_metrics(episodes) if episodes else {}),
        **memory,
        # The mean surprise of what was drawn estimates the entropy of the policy that drew it, with its noise. Nothing
        # is drawn if every environment fails before the first turn.
        **({"sampling/entropy": surprise / tokens} if tokens else {}),
        "time/rollout_s": seconds,
        "time/switch_s": sum(rollout.switch_s for rollout in rollouts),
        "speed/rollout_tokens_per_s": drawn / seconds,
    }


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The metrics of a rollout's episodes: means over them, shares of them, and seconds of waiting."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(episodes)

    calls = sum(episode.tool_calls for episode in episodes)
    return {
        "environment/reward": mean([episode.reward for episode in episodes]),
        "environment/turns": mean([episode.model_turns for episode in episodes]),
        "environment/tokens": mean([episode.written.count(False) for episode in episodes]),
        "environment/tool_calls": calls / len(episodes),
        "environment/tool_errors_share": sum(episode.tool_errors for episode in episodes) / max(calls, 1),
        "environment/turn_limit_share": mean([episode.ended == "turns" for episode in episodes]),
        "environment/failed_share": mean([episode.ended == "failed" for episode in episodes]),
        "time/environment_s": mean([episode.waited_s for episode in episodes]),
        "time/environment_longest_s": max(episode.waited_s for episode in episodes),
    }
