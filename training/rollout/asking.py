"""Prompts -> groups of completions: the one call of an engine for a step, a validation and an evaluation.

`training/rollout/prompts.py` reads what is asked, and `training/rewards/grading.py` grades what is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl.base.philox import derive_seed
from training.loss.groups import Group, Prompt, Sample, grouped

if TYPE_CHECKING:
    from qerl.engine.interface import Engine, Finished, SamplingParams
    from qerl.episodes.play import Environments


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
