"""Examples -> prompts, and which of them each step trains on; that depends on the seed and the step alone.

The prompt is built by `qerl.data.tasks`, the same code that evaluation uses, and kept as token ids, so that no second
template can slip in between.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from qerl.base.errors import DataError
from qerl.data.rows import naming, sources_of
from qerl.data.sequences import Renderer
from qerl.data.tasks import for_environment, load_examples, messages_of, task_of
from training.rollout.groups import Prompt
from training.rollout.order import mixed_rows, most_per_rollout, rollout_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import DataConfig, RunConfig
    from qerl.data.tasks import Example, Message
    from qerl.episodes.endpoint import Chat
    from training.rollout.curriculum import Curriculum

logger = logging.getLogger(__name__)


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, at_least: int, chat: Chat | None = None, held_out: int = 0
) -> list[Prompt]:
    """Read the examples, render their prompts, and drop those that are over-long or written in part (counted, named).

    A `chat` renders them with the tools of an environment. The last `held_out` examples are left to validation.

    Raises DataError if fewer than `at_least` (the prompts of one step) are left.
    """
    examples = training_examples(config, chat is not None)
    if held_out >= len(examples):
        raise DataError(
            f"held_out {held_out} leaves nothing of {len(examples)} usable rows to train on: give more rows, or hold "
            "out fewer"
        )
    examples = examples[: len(examples) - held_out]
    asked = [(example, messages_of_prompt(config, example)) for example in examples]
    rendered = Renderer(tokenizer, config.chat_template_kwargs, chat).rows(asked)
    kept = [row for row in rendered if len(row.ids) <= config.max_prompt_tokens]
    _report_long(config, [row.example for row in rendered if len(row.ids) > config.max_prompt_tokens])
    if len(kept) < at_least:
        raise DataError(
            f"{len(kept)} usable examples are fewer than the {at_least} prompts of one step: give more rows, "
            f"{'raise data.max_prompt_tokens, ' if len(kept) < len(rendered) else ''}or lower rollout.prompts_per_step"
        )
    return [
        Prompt(number, row.ids, tokenizer.decode(row.ids, skip_special_tokens=False), row.example, row.messages)
        for number, row in enumerate(kept)
    ]


def training_examples(config: DataConfig, episodes: bool = False) -> list[Example]:
    """The usable rows of one source, those that are held out included; with `episodes` they are for an environment."""
    examples, _ = load_examples(
        for_environment(task_of(config)) if episodes else task_of(config),
        source=config.source,
        split=config.split,
        columns=config.columns,
        limit=config.limit,
        keep_unreadable=config.keep_unreadable,
    )
    return examples


def load_all_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, chat: Chat | None = None) -> list[Prompt]:
    """The prompts of all sources of a recipe, one source after another. Raises DataError if one has too few."""
    sources = sources_of(config)
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
    """The prompts of each step of a run, from `start_step` on."""
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
    """Name and weight of each source."""
    return tuple((source.name, source.weight) for source in sources_of(config))


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


def messages_of_prompt(config: DataConfig, example: Example) -> tuple[Message, ...]:
    """The chat messages of a row, as the recipe asks for them."""
    return tuple(messages_of(task_of(config), example, config.system_prompt, config.prompt_template))


def _report_long(config: DataConfig, examples: list[Example]) -> None:
    if examples:
        logger.warning(
            "%d prompts are longer than data.max_prompt_tokens=%d and are left out: %s",
            len(examples),
            config.max_prompt_tokens,
            ", ".join(example.id for example in examples[:5]),
        )
