"""What is carried over from rollout to rollout, for all ranks: between the steps, in a checkpoint, and dealt anew.

A checkpoint's file does not depend on who wrote it. If a run goes on with another number of ranks, whole groups are
dealt anew, oldest first, with the prompts that some ranks had begun before others; then its numbers are no longer those
of the run that went on as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.rollout.carry_over import Begun, BegunGroup, Kept, Pool, Share, carry_over_metrics
from training.rollout.order import rollout_rows

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel
    from qerl.config.schema import RunConfig
    from qerl.engine.interface import SamplingParams
    from training.rollout.groups import GradedGroup, Prompt

logger = logging.getLogger(__name__)

FILE = "carry_over.pt"


class CarryOver:
    """Knows what each rank has in progress before the present rollout, and before the one after it."""

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
