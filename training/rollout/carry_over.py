"""Completions that a step leaves unfinished go on in the next step, so that no step waits for its longest one.

These are "partial rollouts" (Kimi k1.5, arXiv 2501.12599, section 2.6.2; APRIL, arXiv 2509.18521). A rank samples as
many completions at once as without this, and begins the next prompts of its share as soon as a whole group has room.
Unfinished ones are kept as token ids and logprobs; keys and values are computed anew. The rules:

1. Prompts begin in the order of the data, each rank taking its own share, so no rank needs word from the others.
2. The oldest groups that have ended are trained on, each at most `rollout.carry_over` rollouts after its first token.
3. A token's logprob is from the policy that drew it, so importance weights correct for each token's own policy.
4. What a rollout leaves follows from (seed, step) and from what was left before, which is part of a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from qerl.engine.interface import Completion, Request, SamplingParams, Source
from training.loss.groups import GradedGroup, Group, Prompt, Sample
from training.rollout.prompts import rollout_rows

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel
    from qerl.config.schema import RunConfig


@dataclass(frozen=True)
class Begun:
    """A completion so far; `drawn` says how many of its tokens each rollout drew, oldest first."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    drawn: tuple[tuple[int, int], ...] = ()  # (rollout, tokens)
    ended: Literal["stop", "length"] | None = None
    experts: torch.Tensor | None = field(default=None, compare=False, repr=False)  # of one that has ended

    def continued(self, rest: Completion, rollout: int) -> Begun:
        """With the tokens that `rollout` drew."""
        tokens, ended = len(rest.token_ids), rest.finish_reason != "unfinished"
        return Begun(
            (*self.token_ids, *rest.token_ids),
            (*self.logprobs, *rest.logprobs),
            (*self.drawn, (rollout, tokens)) if tokens else self.drawn,
            rest.finish_reason if ended else None,
            rest.experts if ended else None,  # the last rollout's, for the older tokens too: it read them anew
        )

    def sample(self) -> Sample:
        """The completion, once it has ended."""
        written = [True] * len(self.token_ids)
        truncated = self.ended == "length"
        return Sample(self.token_ids, self.logprobs, written, truncated, drawn=self.drawn, experts=self.experts)


@dataclass(frozen=True)
class BegunGroup:
    """The completions of one prompt, number `row` of the run's, whose turn came in rollout `since`."""

    row: int
    since: int
    completions: tuple[Begun, ...]

    @property
    def untouched(self) -> bool:
        """Whether nothing has been sampled yet."""
        return not any(each.token_ids for each in self.completions)


@dataclass(frozen=True)
class Kept:
    """What a rank has in progress between two rollouts, oldest first; `taken` prompts of its share have begun."""

    groups: tuple[BegunGroup, ...] = ()
    taken: int = 0


@dataclass(frozen=True)
class Share:
    """What one of `ranks` samples: `groups` of the `all_groups` of each rollout, the first of which is number `first`.

    `row(n)` is the nth row of its share of the data, which has `rows` rows in the whole run.
    """

    prompts: Sequence[Prompt]
    row: Callable[[int], int]
    rows: int
    groups: int
    group_size: int
    first: int = 0
    rank: int = 0
    ranks: int = 1
    all_groups: int = 0

    def stream(self, number: int) -> int:
        """The random stream of the rank's request of that number in a rollout, which no other request has.

        The first requests have those that they would have without carry-over.
        """
        own = self.groups * self.group_size
        if number < own:
            return self.first * self.group_size + number
        return self.all_groups * self.group_size + (number - own) * self.ranks + self.rank


class Pool(Source):
    """The groups that a rank has in progress during one rollout. It is what the engine asks.

    At most (carry_over + 1) times a rank's share is in progress. The call of the engine ends when the rank's share of
    the step's groups has ended, and not before the groups have ended that could otherwise come too late.
    """

    def __init__(self, kept: Kept, share: Share, sampling: SamplingParams, rollout: int, longest: int) -> None:
        """`longest` is `rollout.carry_over`."""
        self._share, self._sampling, self._rollout = share, sampling, rollout
        self._taken, self._most = kept.taken, (longest + 1) * share.groups
        self._groups = list(kept.groups)
        self._left = [sum(each.ended is None for each in group.completions) for group in kept.groups]
        self._due = due([group.since for group in kept.groups], share.groups, rollout, longest)
        self._waiting = [place for place, group in enumerate(kept.groups) if group.untouched]
        self._places: list[tuple[int, int]] = []  # the group and the member of each request
        self._running, self._begun = 0, False

    # -- what the engine asks

    def begin(self, wait: bool, together: bool) -> list[Request] | None:
        if self._enough():
            return None
        new = [] if self._begun else self._carried()
        self._begun = True
        while self._has_room():
            place = self._next_group()
            new += [self._request(place, member) for member in range(self._share.group_size)]
        return new

    def ended(self, indices: Sequence[int]) -> bool:
        for index in indices:
            self._left[self._places[index][0]] -= 1
        self._running -= len(indices)
        return self._enough() or self._has_room()

    def finished(self, index: int, completion: Completion) -> None:
        place, member = self._places[index]
        group = self._groups[place]
        completions = list(group.completions)
        completions[member] = completions[member].continued(completion, self._rollout)
        self._groups[place] = replace(group, completions=tuple(completions))

    # -- what comes of it

    def settle(self, unfinished: Mapping[int, Completion]) -> tuple[list[Group], Kept]:
        """The groups to train on, and what is kept; `unfinished` is what the engine's call left."""
        for index, completion in unfinished.items():
            self.finished(index, completion)
        chosen = [place for place, left in enumerate(self._left) if not left][: self._share.groups]
        assert len(chosen) == self._share.groups, "the engine stopped before there was enough"
        kept = tuple(group for place, group in enumerate(self._groups) if place not in chosen)
        return [self._whole(self._groups[place]) for place in chosen], Kept(kept, self._taken)

    @property
    def drawn_tokens(self) -> int:
        """Tokens that this rollout drew."""
        parts = [part for group in self._groups for each in group.completions for part in each.drawn]
        return sum(tokens for rollout, tokens in parts if rollout == self._rollout)

    def _whole(self, group: BegunGroup) -> Group:
        return Group(self._share.prompts[group.row], tuple(each.sample() for each in group.completions))

    def _enough(self) -> bool:
        return self._left.count(0) >= self._share.groups and not any(self._left[: self._due])

    def _has_room(self) -> bool:
        size = self._share.group_size
        if self._running + size > self._share.groups * size:
            return False
        return bool(self._waiting) or (self._taken < self._share.rows and len(self._groups) < self._most)

    def _carried(self) -> list[Request]:
        return [
            self._request(place, member)
            for place, group in enumerate(self._groups)
            for member, each in enumerate(group.completions)
            if each.ended is None and not group.untouched
        ]

    def _next_group(self) -> int:
        """The place of a group that begins: one that was left waiting, or one of the next prompt."""
        if self._waiting:
            return self._waiting.pop(0)
        row, size = self._share.row(self._taken), self._share.group_size
        self._groups.append(BegunGroup(row, self._rollout, (Begun(),) * size))
        self._left.append(size)
        self._taken += 1
        return len(self._groups) - 1

    def _request(self, place: int, member: int) -> Request:
        group = self._groups[place]
        prompt, begun = self._share.prompts[group.row], group.completions[member].token_ids
        index = len(self._places)
        self._places.append((place, member))
        self._running += 1
        sampling = replace(self._sampling, max_new_tokens=self._sampling.max_new_tokens - len(begun))
        return Request(index, [*prompt.ids, *begun], sampling, self._share.stream(index))


def due(since: Sequence[int], groups: int, rollout: int, longest: int) -> int:
    """How many of the oldest groups have to end in this rollout, so that none is trained on after `longest` rollouts.

    `since` are the rollouts in which the groups began, oldest first, and each rollout trains on `groups` of them. By
    each later rollout only so many more can have been trained on.
    """
    last = range(rollout, rollout + longest + 1)
    needed = [sum(each + longest <= by for each in since) - (by - rollout) * groups for by in last]
    return max(0, min(max(needed), groups))


def carry_over_metrics(groups: Sequence[GradedGroup], kept: Sequence[Kept], rollout: int) -> dict[str, float]:
    """How old what a step trains on is, in rollouts, and what the step leaves to the next."""
    samples = [sample for graded in groups for sample in graded.group.samples]
    ages = [(rollout - drawn, tokens) for sample in samples for drawn, tokens in sample.drawn]
    tokens = sum(count for _, count in ages)
    left = [each for one in kept for group in one.groups for each in group.completions if each.ended is None]
    return {
        "carry_over/continued_share": sum(len(sample.drawn) > 1 for sample in samples) / len(samples),
        "carry_over/old_tokens_share": sum(count for age, count in ages if age) / tokens,
        "carry_over/mean_age": sum(age * count for age, count in ages) / tokens,
        "carry_over/max_age": max(age for age, _ in ages),
        "carry_over/kept_groups": sum(len(one.groups) for one in kept),
        "carry_over/kept_completions": len(left),
        "carry_over/kept_tokens": sum(
            len(each.token_ids) for one in kept for group in one.groups for each in group.completions
        ),
    }


logger = logging.getLogger(__name__)

FILE = "carry_over.pt"


class CarryOver:
    """Knows what each rank has in progress before the present rollout, and before the one after it.

    A checkpoint's file does not depend on who wrote it. If a run goes on with another number of ranks, whole groups are
    dealt anew, oldest first, with the prompts that some ranks had begun before others; its numbers then differ from
    those of the run with the same ranks.
    """

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], parallel: Parallel) -> None:
        self._rollout, self._run = config.rollout, config.run
        self._updates = config.loss.num_iterations
        self._prompts, self._parallel = prompts, parallel
        self._before: dict[int, tuple[Kept, ...]] = {}
        rows = partial(rollout_rows, len(prompts), config.rollout.prompts_per_step, config.run.seed)
        self._rows = lru_cache(maxsize=16)(rows)

    def rollout(self, step: int) -> int:
        """The number of the rollout at a step."""
        return step // self._updates

    def before(self, step: int) -> tuple[Kept, ...]:
        """What each rank has in progress before the rollout at `step`."""
        rollout = self.rollout(step)
        return self._before.setdefault(rollout, self._nothing(rollout))

    def pool(self, step: int, sampling: SamplingParams) -> Pool:
        """What this rank has in progress in the rollout at `step`."""
        rank, longest = self._parallel.rank, self._rollout.carry_over
        share = self._share(rank, self._parallel.size)
        return Pool(self.before(step)[rank], share, sampling, self.rollout(step), longest)

    def keep(self, step: int, kept: Sequence[Kept]) -> None:
        """Note what the ranks have after the rollout at `step`. If the step is abandoned, it is sampled again."""
        rollout = self.rollout(step)
        self._before = {rollout: self.before(step), rollout + 1: tuple(kept)}

    def metrics(self, step: int, groups: Sequence[GradedGroup]) -> dict[str, float]:
        """Of the rollout at `step`, which trains on `groups`."""
        rollout = self.rollout(step)
        return carry_over_metrics(groups, self._before[rollout + 1], rollout)

    def save(self, folder: Path, step: int) -> None:
        """Write what is carried into the step after `step` optimizer steps."""
        torch.save(_written(self.before(step), self._prompts), folder / FILE)

    def load(self, folder: Path, step: int) -> None:
        """Take over what was saved after `step` optimizer steps, by however many ranks."""
        rollout = self.rollout(step)
        if not (folder / FILE).exists():
            return
        kept = _read(torch.load(folder / FILE, weights_only=True), self._prompts)
        if len(kept) != self._parallel.size:
            count = sum(len(one.groups) for one in kept)
            logger.warning("%d groups that %d ranks began are dealt to %d", count, len(kept), self._parallel.size)
            kept = self._dealt(kept, rollout)
        self._before = {rollout: kept}

    def _nothing(self, rollout: int) -> tuple[Kept, ...]:
        ranks = range(self._parallel.size)
        return tuple(Kept(taken=rollout * self._share(rank, self._parallel.size).groups) for rank in ranks)

    def _share(self, rank: int, ranks: int) -> Share:
        per_rollout = self._rollout.prompts_per_step
        own = replace(self._parallel, rank=rank, size=ranks).span(per_rollout)
        groups = own.stop - own.start

        def row(number: int) -> int:
            rollout, place = divmod(number, groups)
            return self._rows(rollout)[own.start + place]

        return Share(
            prompts=self._prompts,
            row=row,
            rows=-(-self._run.steps // self._updates) * groups,
            groups=groups,
            group_size=self._rollout.group_size,
            first=own.start,
            rank=rank,
            ranks=ranks,
            all_groups=per_rollout,
        )

    def _dealt(self, kept: Sequence[Kept], rollout: int) -> tuple[Kept, ...]:
        """The same for the ranks that there are now. Prompts that only some ranks had reached wait to begin."""
        before = [self._share(rank, len(kept)) for rank in range(len(kept))]
        ahead = max(-(-one.taken // share.groups) for one, share in zip(kept, before, strict=True))
        skipped = [
            BegunGroup(share.row(number), rollout, (Begun(),) * share.group_size)
            for one, share in zip(kept, before, strict=True)
            for number in range(one.taken, ahead * share.groups)
        ]
        groups = sorted([group for one in kept for group in one.groups] + skipped, key=lambda group: group.since)
        shares = [self._share(rank, self._parallel.size) for rank in range(self._parallel.size)]
        turns = [rank for rank, share in enumerate(shares) for _ in range(share.groups)]
        own = [groups_of(groups, turns, rank) for rank in range(len(shares))]
        return tuple(Kept(tuple(one), ahead * share.groups) for one, share in zip(own, shares, strict=True))


def groups_of(groups: Sequence[BegunGroup], turns: Sequence[int], rank: int) -> list[BegunGroup]:
    """The groups of a rank, if the ranks take them by `turns`, over and over."""
    return [group for number, group in enumerate(groups) if turns[number % len(turns)] == rank]


def _written(kept: Sequence[Kept], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """As tensors and plain values; a prompt's tokens say later whether the data has changed."""
    completions = [each for one in kept for group in one.groups for each in group.completions]
    return {
        "taken": [one.taken for one in kept],
        "groups": [[(group.row, group.since, len(group.completions)) for group in one.groups] for one in kept],
        "prompts": [list(prompts[group.row].ids) for one in kept for group in one.groups],
        "completions": [(len(each.token_ids), each.ended, each.drawn) for each in completions],
        "token_ids": torch.tensor([token for each in completions for token in each.token_ids], dtype=torch.int32),
        "logprobs": torch.tensor([value for each in completions for value in each.logprobs], dtype=torch.float64),
        "experts": [each.experts for each in completions],
    }


def _read(found: dict[str, Any], prompts: Sequence[Prompt]) -> tuple[Kept, ...]:
    """What `_written` was given. Groups whose prompt is another now begin anew, with the prompt that has its place."""
    sizes = [length for length, *_ in found["completions"]]
    experts = found.get("experts") or [None] * len(sizes)  # older files have none
    columns = found["token_ids"].split(sizes), found["logprobs"].split(sizes), found["completions"], experts
    completions = (
        Begun(tuple(ids.tolist()), tuple(values.tolist()), tuple(map(tuple, drawn)), ended, chosen)
        for ids, values, (_, ended, drawn), chosen in zip(*columns, strict=True)
    )
    before, changed, kept = iter(found["prompts"]), 0, []
    for taken, groups in zip(found["taken"], found["groups"], strict=True):
        own = []
        for row, since, size in groups:
            begun, ids = tuple(next(completions) for _ in range(size)), next(before)
            if row >= len(prompts) or list(prompts[row].ids) != ids:
                changed, row, begun = changed + 1, row % len(prompts), (Begun(),) * size
            own.append(BegunGroup(row, since, begun))
        kept.append(Kept(tuple(own), taken))
    if changed:
        logger.warning("%d groups of completions begin anew, because their prompts have changed", changed)
    return tuple(kept)
