"""A curriculum: rows whose latest completions were all right, or all wrong, are passed over for most of the time.

Each source goes through its rows epoch by epoch, as without a curriculum. A row that was measured as hard or as easy is
taken in some epochs only (`hard_share`, `easy_share`), so that it is measured again as the policy changes; rows that
were not measured are always taken. If a whole epoch has no other row left, passed-over ones are taken in their order.
prime-rl calls the same thing difficulty pools (easy_threshold, hard_threshold), verl a curriculum sampler.

What was measured and where each source stands is the state of the run. A checkpoint has it as curriculum.json, as it
was when the last finished step ended: a run that left a step in its midst continues with the rows of that step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.data.grading.grade import CORRECT_FROM
from training.rollout.order import Walk, shares
from training.rollout.seeds import derive_seed

if TYPE_CHECKING:
    from qerl.config.data import CurriculumConfig
    from training.rewards.rewards import Rewards
    from training.rollout.groups import GradedGroup, Prompt

FILE = "curriculum.json"  # in a checkpoint
DECIDING = "accuracy"


class Curriculum:
    """Chooses the rows of each rollout, and measures what became of them. `sources` are names and weights."""

    def __init__(
        self,
        config: CurriculumConfig,
        sources: Sequence[tuple[str, float]],
        prompts: Sequence[Prompt],
        rewards: Rewards,
        seed: int,
    ) -> None:
        self._config, self._prompts, self._seed = config, prompts, seed
        self._weights = [weight for _, weight in sources]
        self._rows = [[prompt.row for prompt in prompts if prompt.source == source] for source in range(len(sources))]
        streams = ["data" if len(sources) == 1 else f"data/{name}" for name, _ in sources]
        self._walks = [Walk(len(rows), seed, stream) for rows, stream in zip(self._rows, streams, strict=True)]
        self._columns = [_column(config.reward, rewards, source) for source in range(len(sources))]
        self._solved: dict[int, float] = {}  # row -> share of its latest completions that were right
        self._before: tuple[int, dict[str, Any]] = (-1, {})  # the latest rollout, and the state before it
        self._passed = 0
        self._shares: tuple[int, Iterator[list[int]] | None] = (0, None)

    def rows(self, rollout: int, prompts: int) -> list[int]:
        """The rows of the next rollout, none twice; its number has to be that of the rollouts before."""
        self._before = rollout, self.state()
        taken = self._taken(rollout, prompts)
        own, self._passed = [], 0
        for source in range(len(self._walks)):
            found, passed = self._next_rows(source, taken.count(source))
            own.append(iter(found))
            self._passed += passed
        return [next(own[source]) for source in taken]

    def _next_rows(self, source: int, count: int) -> tuple[list[int], int]:
        """So many rows of a source, and how many were passed over."""
        rows = self._rows[source]
        found, passed = self._walks[source].take(count, lambda row, epoch: self._admits(rows[row], epoch))
        return [rows[row] for row in found], passed

    def _taken(self, rollout: int, prompts: int) -> list[int]:
        """The sources of a rollout's prompts. After a resume, those before are gone through first."""
        position, drawn = self._shares
        if drawn is None or position != rollout:
            drawn = islice(shares(self._weights, prompts), rollout, None)
        self._shares = rollout + 1, drawn
        return next(drawn)

    def observe(self, groups: Sequence[GradedGroup]) -> None:
        """Note how many of each group's completions were right."""
        for graded in groups:
            prompt = graded.group.prompt
            right = graded.rewards_G_F[:, self._columns[prompt.source]] >= CORRECT_FROM
            self._solved[prompt.row] = right.double().mean().item()

    def preferred(self, order: Sequence[int]) -> list[int]:
        """The same rows, those that are neither hard nor easy first."""
        return sorted(order, key=lambda row: self._is_hard(row) or self._is_easy(row))

    def metrics(self) -> dict[str, float]:
        """The share of all rows that was measured, the shares of these that are hard and easy, and rows passed over."""
        measured = max(1, len(self._solved))
        return {
            "curriculum/measured_share": len(self._solved) / len(self._prompts),
            "curriculum/hard_share": sum(map(self._is_hard, self._solved)) / measured,
            "curriculum/easy_share": sum(map(self._is_easy, self._solved)) / measured,
            "curriculum/passed_rows": float(self._passed),
        }

    # -- the run's state

    def state(self) -> dict[str, Any]:
        """All that the next rollouts depend on, as JSON holds it."""
        return {"solved": dict(self._solved), "walks": [walk.state() for walk in self._walks]}

    def save(self, folder: Path, rollouts: int) -> None:
        """Write the state after so many rollouts, of which the latest may have been left in its midst."""
        number, before = self._before
        (folder / FILE).write_text(json.dumps(before if number == rollouts else self.state()), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Take over the state of a checkpoint. Where a source has other rows than then, it begins a new epoch."""
        found: Mapping[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        self._solved = {int(row): share for row, share in found["solved"].items() if int(row) < len(self._prompts)}
        for walk, state in zip(self._walks, found["walks"], strict=True):
            walk.load(state)

    def _admits(self, row: int, epoch: int) -> bool:
        share = 1.0
        if self._is_hard(row):
            share = self._config.hard_share
        elif self._is_easy(row):
            share = self._config.easy_share
        return derive_seed(self._seed, epoch, f"curriculum/{row}") < share * 2**63

    def _is_hard(self, row: int) -> bool:
        return row in self._solved and self._solved[row] <= self._config.low

    def _is_easy(self, row: int) -> bool:
        return row in self._solved and self._solved[row] >= self._config.high


def _column(wanted: str | None, rewards: Rewards, source: int) -> int:
    """The place among the rewards of the one that says what is right for a source."""
    own = [rewards.functions[index].__name__ for index in rewards.of_source(source)]
    names = [wanted, wanted.replace(":", ".").rpartition(".")[2]] if wanted else [DECIDING]
    return rewards.names.index(next((name for name in names if name in own), own[0]))
