"""Examples -> prompts as token ids, and which of them each step trains on.

The prompt is built by `qerl.data.tasks`, the same code that evaluation uses, and kept as token ids, so that no second
template can slip in between.

The rows of a rollout depend on seed and step alone. Several sources take turns by their weights (`shares`), each in an
endless sequence of epochs of its own; a run that starts at a later rollout goes through the earlier ones first, which
takes no time. A `Curriculum` passes over rows that were too hard or too easy; what it measured is part of a checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import DataError
from qerl.base.philox import derive_seed, permutation
from qerl.data.examples import examples_of
from qerl.data.grading.grade import CORRECT_FROM
from qerl.data.rows import naming, sources_of
from qerl.data.sequences import Renderer
from qerl.data.tasks import Example, Task, messages_of, task_of
from training.loss.groups import GradedGroup, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import DataConfig, RunConfig
    from qerl.episodes.endpoint import Chat
    from training.rewards.rewards import Rewards


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
        drawn = permutation(rows, seed, number, "data").tolist()
        begun = number * rows % prompts_per_step  # rows of the epoch before in the rollout that this epoch completes
        taken = set(order[-begun:] if begun else ())
        head = dict.fromkeys([row for row in drawn if row not in taken][: prompts_per_step - begun])
        order = [*head, *(row for row in drawn if row not in head)] if taken else drawn
    return order


def shares(weights: Sequence[float], prompts: int) -> Iterator[list[int]]:
    """For each rollout without end, the source of each of its prompts, in the order in which they are taken.

    The largest remainders decide, and what a source got too little or too much of is carried over to the next rollout.
    """
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
                self._left = deque(permutation(self._rows, self._seed, self._epoch, self._stream).tolist())
                self._epoch += 1
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


FILE = "curriculum.json"  # in a checkpoint
DECIDING = "accuracy"
HARD_SHARE, EASY_SHARE = 0.2, 0.1  # of the rows never, or always, right: so many are tried again in an epoch


class Curriculum:
    """Chooses the rows of each rollout, and measures what became of them. `sources` are names and weights.

    Each source goes through its rows epoch by epoch, as without a curriculum. A row whose latest completions were all
    right or all wrong is taken in some epochs only (HARD_SHARE, EASY_SHARE), so that it is measured again as the
    policy changes; rows that were not measured are always taken. If an epoch has no other row left, passed-over ones
    are taken in their order. prime-rl calls this difficulty pools (easy_threshold, hard_threshold), verl a curriculum
    sampler.

    What was measured and where each source stands is the state of the run. A checkpoint has it as curriculum.json, as
    it was when the last finished step ended: a run that left a step in its midst continues with the rows of that step.
    """

    def __init__(
        self, sources: Sequence[tuple[str, float]], prompts: Sequence[Prompt], rewards: Rewards, seed: int
    ) -> None:
        self._prompts, self._seed = prompts, seed
        self._weights = [weight for _, weight in sources]
        self._rows = [[prompt.row for prompt in prompts if prompt.source == source] for source in range(len(sources))]
        streams = ["data" if len(sources) == 1 else f"data/{name}" for name, _ in sources]
        self._walks = [Walk(len(rows), seed, stream) for rows, stream in zip(self._rows, streams, strict=True)]
        self._columns = [_column(rewards, source) for source in range(len(sources))]
        self._solved: dict[int, float] = {}  # row -> share of its latest completions that were right
        self._before: tuple[int, dict[str, Any]] = (-1, {})  # the latest rollout, and the state before it
        self._passed = 0
        self._shares: tuple[int, Iterator[list[int]] | None] = (0, None)

    def rows(self, rollout: int, prompts: int) -> list[int]:
        """The rows of the next rollout, none twice; its size has to be the same as before."""
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
            rewards_G = graded.rewards_G_F[:, self._columns[prompt.source]]
            if len(known := rewards_G[~rewards_G.isnan()]):
                self._solved[prompt.row] = (known >= CORRECT_FROM).double().mean().item()

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
            share = HARD_SHARE
        elif self._is_easy(row):
            share = EASY_SHARE
        return derive_seed(self._seed, epoch, f"curriculum/{row}") < share * 2**63

    def _is_hard(self, row: int) -> bool:
        return row in self._solved and self._solved[row] == 0

    def _is_easy(self, row: int) -> bool:
        return row in self._solved and self._solved[row] == 1


def _column(rewards: Rewards, source: int) -> int:
    """The place among the rewards of the one that says what is right for a source: accuracy, or else its first."""
    own = [rewards.functions[index].__name__ for index in rewards.of_source(source)]
    return rewards.names.index(DECIDING if DECIDING in own else own[0])


logger = logging.getLogger(__name__)


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, at_least: int, chat: Chat | None = None, held_out: int = 0
) -> list[Prompt]:
    """Read the examples, render their prompts, and drop those that are over-long or written in part (counted, named).

    A `chat` renders them with the tools of an environment. The last `held_out` examples are left to validation.

    Raises DataError if fewer than `at_least` (the prompts of one step) are left.
    """
    examples = examples_of(config, chat is not None)
    if held_out >= len(examples):
        raise DataError(
            f"held_out {held_out} leaves nothing of {len(examples)} usable rows to train on: give more rows, or hold "
            "out fewer"
        )
    renderer = Renderer(tokenizer, config.chat_template_kwargs, chat and chat.prompt)
    prompts = prompts_of(task_of(config), examples[: len(examples) - held_out], renderer)
    kept = [prompt for prompt in prompts if len(prompt.ids) <= config.max_prompt_tokens]
    _report_long(config, [prompt.example for prompt in prompts if len(prompt.ids) > config.max_prompt_tokens])
    if len(kept) < at_least:
        raise DataError(
            f"{len(kept)} usable examples are fewer than the {at_least} prompts of one step: give more rows, "
            f"{'raise data.max_prompt_tokens, ' if len(kept) < len(prompts) else ''}or lower rollout.prompts_per_step"
        )
    return [replace(prompt, row=number) for number, prompt in enumerate(kept)]


def prompts_of(task: Task, examples: Sequence[Example], renderer: Renderer) -> list[Prompt]:
    """Rows as the task's prompts, in a step, a validation and an evaluation alike. Those that the chat template writes
    in part are left out, as `renderer` counts them. Raises DataError if none is left."""
    rendered = renderer.rows([(example, messages_of(task, example)) for example in examples])
    return [
        Prompt(
            number, row.ids, renderer.tokenizer.decode(row.ids, skip_special_tokens=False), row.example, row.messages
        )
        for number, row in enumerate(rendered)
    ]


def load_all_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, chat: Chat | None = None) -> list[Prompt]:
    """The prompts of all sources of a recipe, one source after another. Raises DataError if one has too few."""
    sources = sources_of(config.data)
    needed = most_per_rollout([source.weight for source in sources], config.rollout.prompts_per_step, _rollouts(config))
    prompts: list[Prompt] = []
    for index, (source, at_least) in enumerate(zip(sources, needed, strict=True)):
        with naming(source):
            own = load_prompts(source.data, tokenizer, at_least, chat, source.held_out)
        prompts += [replace(prompt, row=len(prompts) + prompt.row, source=index) for prompt in own]
    return prompts


def _rollouts(config: RunConfig) -> int:
    return math.ceil(config.run.steps / config.loss.num_iterations)


def step_prompts(
    config: RunConfig, prompts: Sequence[Prompt], start_step: int, curriculum: Curriculum | None = None
) -> StepPrompts:
    updates = config.loss.num_iterations
    return StepPrompts(
        prompts,
        config.rollout.prompts_per_step,
        updates,
        rollouts=_rollouts(config),
        seed=config.run.seed,
        first=start_step // updates,
        sources=weights_of(config),
        curriculum=curriculum,
    )


def weights_of(config: RunConfig) -> tuple[tuple[str, float], ...]:
    return tuple((source.name, source.weight) for source in sources_of(config.data))


@dataclass(frozen=True)
class StepPrompts:
    """What the training loop iterates over: the prompts of each optimizer step, from the one that comes next.

    Rollout r takes the next `per_rollout` prompts of an endless sequence of epochs, and serves `updates`
    optimizer steps. Starting at rollout r gives what a run from the beginning would see there.
    """

    prompts: Sequence[Prompt]
    per_rollout: int
    updates: int
    rollouts: int  # of the whole run
    seed: int
    first: int = 0  # the rollout that a resumed run continues with
    sources: tuple[tuple[str, float], ...] = (("", 1.0),)  # name and weight of each
    curriculum: Curriculum | None = None

    def __len__(self) -> int:
        """Steps of the whole run, so that the run is one epoch wherever it starts."""
        return self.rollouts * self.updates

    def __iter__(self) -> Iterator[list[Prompt]]:
        for rows in self._rows():
            for _ in range(self.updates):
                yield [self.prompts[row] for row in rows]

    def _rows(self) -> Iterator[list[int]]:
        if self.curriculum is not None:
            for rollout in range(self.first, self.rollouts):
                yield self.curriculum.rows(rollout, self.per_rollout)
        elif len(self.sources) == 1:
            for rollout in range(self.first, self.rollouts):
                yield rollout_rows(len(self.prompts), self.per_rollout, self.seed, rollout)
        else:
            places = [[] for _ in self.sources]
            for prompt in self.prompts:
                places[prompt.source].append(prompt.row)
            mixed = mixed_rows(self.sources, places, self.per_rollout, self.seed)
            yield from islice(mixed, self.first, self.rollouts)


def _report_long(config: DataConfig, examples: list[Example]) -> None:
    if examples:
        logger.warning(
            "%d prompts are longer than data.max_prompt_tokens=%d and are left out: %s",
            len(examples),
            config.max_prompt_tokens,
            ", ".join(example.id for example in examples[:5]),
        )
