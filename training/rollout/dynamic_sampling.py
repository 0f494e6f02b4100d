"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2, eq. 11): groups without a signal are replaced by others.

A group is informative if its rewards differ and a completion of it enters the loss; any other has a gradient of 0. As
long as a step's batch lacks informative groups, an extra rollout samples further prompts, all with the same policy.
Everything depends only on (seed, step, attempt) and on what the step sampled before, so that a resumed run needs no
state. Departures from the paper:

1. A group is judged by the sum of weight * reward, from which the advantages are computed, and not by whether the
   answers are right. The two agree if accuracy is the only reward.
2. The extra rollouts of a step are bounded. Places that are still empty get uninformative groups, which are counted.
3. Extra prompts are rows that the step has not kept, in an order of their own for each (seed, step), those that it has
   drawn least often first. The order of the data stays the same as without them.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.loss.groups import GradedGroup

logger = logging.getLogger(__name__)

MARGIN = 1.5  # groups drawn for each that is expected to be needed: one more rollout costs more than some groups
MAX_EXTRA_ROLLOUTS = 6  # of a step; what is then missing is filled with groups without a signal
LEAST_BOUND = 16  # prompts that an extra rollout may have, however small the step is


@dataclass(frozen=True)
class Chosen:
    """The groups that a step trains on, out of all that it sampled."""

    kept: list[GradedGroup]
    sampled: list[GradedGroup]
    extra_rollouts: int
    extra_s: float  # seconds of the extra rollouts and their grading

    def metrics(self) -> dict[str, float]:
        """Counts of the step; a group is discarded if it was sampled and is not trained on."""
        return {
            "dynamic_sampling/extra_rollouts": self.extra_rollouts,
            "dynamic_sampling/sampled_groups": len(self.sampled),
            "dynamic_sampling/informative_share": sum(group.informative for group in self.sampled) / len(self.sampled),
            "dynamic_sampling/discarded_groups": len(self.sampled) - len(self.kept),
            "dynamic_sampling/discarded_tokens": _tokens(self.sampled) - _tokens(self.kept),
            "dynamic_sampling/filled_groups": sum(not group.informative for group in self.kept),
            "time/extra_rollouts_s": self.extra_s,
        }


def fill_batch(
    draw: Callable[[list[int]], list[GradedGroup]],
    rows: list[int],
    order: Sequence[int],
    max_extra_rollouts: int,
    source_of: Callable[[int], int] = lambda row: 0,
) -> Chosen:
    """The step's groups: one for each of `rows`, uninformative ones replaced by groups of further rows of their source.

    `draw` samples and grades one group for each row that it is given; `order` has all rows, as extra prompts are taken.
    """
    sampled, extra_rollouts = draw(rows), 0
    wanted = Counter(map(source_of, rows))  # groups of each source
    started = time.perf_counter()
    while (extra_rollouts < max_extra_rollouts) and (more := _missing_rows(sampled, wanted, order, source_of)):
        sampled += draw(more)
        extra_rollouts += 1
    extra_s = time.perf_counter() - started if extra_rollouts else 0.0
    kept: list[int] = []
    for source, size in wanted.items():
        places = [place for place, graded in enumerate(sampled) if _source(graded) == source]
        kept += [places[index] for index in keep([sampled[place].informative for place in places], size)]
    chosen = Chosen([sampled[place] for place in sorted(kept)], sampled, extra_rollouts, extra_s)
    if filled := sum(not group.informative for group in chosen.kept):
        logger.warning(
            "dynamic sampling: %d of %d groups have no signal after %d extra rollouts (%d of %d sampled ones had one)",
            filled,
            len(rows),
            extra_rollouts,
            sum(group.informative for group in sampled),
            len(sampled),
        )
    return chosen


def _missing_rows(
    sampled: Sequence[GradedGroup], wanted: Counter[int], order: Sequence[int], source_of: Callable[[int], int]
) -> list[int]:
    """The rows of the next extra rollout, for each source that lacks informative groups; none if no source does."""
    found: list[int] = []
    for source, size in wanted.items():
        own = [graded for graded in sampled if _source(graded) == source]
        if count := extra_prompts([graded.informative for graded in own], size):
            kept = {graded.group.prompt.row for graded in own if graded.informative}
            candidates = order if len(wanted) == 1 else [row for row in order if source_of(row) == source]
            found += next_rows(candidates, [graded.group.prompt.row for graded in own], kept, count)
    return found


def _source(graded: GradedGroup) -> int:
    return graded.group.prompt.source


def _tokens(groups: Sequence[GradedGroup]) -> int:
    return sum(graded.group.tokens for graded in groups)


def keep(informative: Sequence[bool], size: int) -> list[int]:
    """Indices of the `size` groups to train on, ascending: the first informative ones, then the first others."""
    first = [index for index, is_informative in enumerate(informative) if is_informative]
    others = [index for index, is_informative in enumerate(informative) if not is_informative]
    return sorted((first + others)[:size])


def extra_prompts(informative: Sequence[bool], size: int) -> int:
    """How many prompts the next extra rollout needs; 0 if `size` informative groups are there.

    Those that are missing, divided by the share that was informative so far (one of each kind added, so that it is
    never 0 or 1), with a margin; at most twice the batch, which bounds the cost where nearly nothing has a signal.
    """
    found = sum(informative)
    if found >= size:
        return 0
    share = (found + 1) / (len(informative) + 2)
    return min(math.ceil(MARGIN * (size - found) / share), max(2 * size, LEAST_BOUND))


def next_rows(order: Sequence[int], drawn: Sequence[int], kept: set[int], count: int) -> list[int]:
    """The next `count` rows (fewer, if there are not so many) that are not kept, least often drawn first."""
    times = Counter(drawn)
    candidates = [row for row in order if row not in kept]
    return sorted(candidates, key=lambda row: times[row])[:count]  # stable: `order` decides among equals
