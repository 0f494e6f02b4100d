"""The order of the rows: which of them each rollout takes, of one source or of several by their weights.

Of one source it is a function of (seed, rollout). Of several, each source has an endless sequence of epochs of its own,
and each rollout takes so many prompts of each that the shares are those of the weights: the largest remainders decide,
and what a source got too little or too much of is carried over to the next rollout. A run that starts at a later
rollout goes through the earlier ones first, which takes no time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

import torch

from training.rollout.seeds import derive_seed


def rollout_rows(rows: int, prompts_per_step: int, seed: int, rollout: int) -> list[int]:
    """The row numbers of one rollout's prompts, none of them twice: a slice of the epochs' orders laid end to end.

    Needs at least as many rows as prompts per step.
    """
    epoch, first = divmod(rollout * prompts_per_step, rows)
    picked = _epoch_order(rows, prompts_per_step, seed, epoch)[first : first + prompts_per_step]
    if missing := prompts_per_step - len(picked):
        picked += _epoch_order(rows, prompts_per_step, seed, epoch + 1)[:missing]
    return picked


def _epoch_order(rows: int, prompts_per_step: int, seed: int, epoch: int) -> list[int]:
    """A permutation of the rows. Those that its first rollout already has, from the epoch before, come right after it.

    Only the last rows of the epoch before matter. Moving rows at that epoch's start cannot change them, unless there
    are fewer rows than two rollouts take; only then are all epochs before gone through.
    """
    order: list[int] = []
    for number in range(max(epoch - 1, 0) if rows >= 2 * prompts_per_step else 0, epoch + 1):
        generator = torch.Generator().manual_seed(derive_seed(seed, number, "data"))
        permutation = torch.randperm(rows, generator=generator).tolist()
        begun = number * rows % prompts_per_step  # rows of the epoch before in the rollout that this epoch completes
        taken = set(order[-begun:] if begun else ())
        head = dict.fromkeys([row for row in permutation if row not in taken][: prompts_per_step - begun])
        order = [*head, *(row for row in permutation if row not in head)] if taken else permutation
    return order


def shares(weights: Sequence[float], prompts: int) -> Iterator[list[int]]:
    """For each rollout without end, the source of each of its prompts, in the order in which they are taken."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * scale) for weight in exact]  # a prompt costs sum(parts), and a source earns its part
    due = [0] * len(parts)
    while True:
        due = [owed + prompts * part for owed, part in zip(due, parts, strict=True)]
        taken = []
        for _ in range(prompts):
            source = due.index(max(due))  # of equals the first
            due[source] -= sum(parts)
            taken.append(source)
        yield taken


def most_per_rollout(weights: Sequence[float], prompts: int, rollouts: int) -> list[int]:
    """The most prompts of each source that one of the run's rollouts takes."""
    if len(weights) == 1:
        return [prompts]
    most = [0] * len(weights)
    for taken in islice(shares(weights, prompts), rollouts):
        most = [max(count, taken.count(source)) for source, count in enumerate(most)]
    return most


def mixed_rows(
    sources: Sequence[tuple[str, float]], rows: Sequence[Sequence[int]], prompts: int, seed: int
) -> Iterator[list[int]]:
    """The rows of each rollout without end, none twice. `sources` are names and weights; `rows` has each one's rows."""
    walks = [Walk(len(own), seed, f"data/{name}") for (name, _), own in zip(sources, rows, strict=True)]
    for taken in shares([weight for _, weight in sources], prompts):
        own = [iter(walk.take(taken.count(source))[0]) for source, walk in enumerate(walks)]
        yield [rows[source][next(own[source])] for source in taken]


class Walk:
    """An endless sequence of epochs over rows, each a permutation, from which every rollout takes as many as it needs.

    `stream` names the random stream. Rows that a rollout has already, from the epoch before, wait for the next one.
    """

    def __init__(self, rows: int, seed: int, stream: str) -> None:
        self._rows, self._seed, self._stream = rows, seed, stream
        self._epoch, self._left = 0, deque()

    def take(self, count: int, admits: Callable[[int, int], bool] = lambda row, epoch: True) -> tuple[list[int], int]:
        """The next rows, none twice, and how many were passed over: those that are not admitted in the epoch.

        Needs at least `count` rows. If two epochs have not enough, rows that were passed over are taken.
        """
        taken, passed, last = {}, {}, self._epoch + 2
        waiting: list[int] = []
        while len(taken) < count:
            if not self._left:
                if self._epoch == last:
                    break
                self._begin_epoch()
            row = self._left.popleft()
            if row in taken:
                waiting.append(row)
            elif admits(row, self._epoch):
                taken[row] = None
            else:
                passed[row] = None
        self._left.extendleft(reversed(waiting))
        instead = [row for row in passed if row not in taken][: count - len(taken)]
        return [*taken, *instead], len(passed) - len(instead)

    def state(self) -> dict[str, Any]:
        """Where it stands, as JSON holds it."""
        return {"rows": self._rows, "epoch": self._epoch, "left": list(self._left)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; with other rows from the next epoch."""
        self._epoch, self._left = state["epoch"], deque(state["left"] if state["rows"] == self._rows else ())

    def _begin_epoch(self) -> None:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self._epoch, self._stream))
        self._left = deque(torch.randperm(self._rows, generator=generator).tolist())
        self._epoch += 1
