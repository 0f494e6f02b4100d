"""Examples -> prompts, and which of them each step trains on; that depends on the seed and the step alone.

The prompt is built by `qerl.tasks`, the same code that evaluation uses, and kept as token ids, so that no second
template can slip in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qerl.errors import DataError
from qerl.tasks import load_examples, messages_of, render_prompt, task_of
from training.rollout.groups import Prompt
from training.rollout.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import DataConfig
    from qerl.environments.chat import Chat
    from qerl.tasks import Example, Message

logger = logging.getLogger(__name__)


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, at_least: int, chat: Chat | None = None
) -> list[Prompt]:
    """Read the examples, render their prompts, and drop the over-long ones (counted and named).

    A `chat` renders them with the tools of an environment.

    Raises DataError if fewer than `at_least` (the prompts of one step) are left.
    """
    task = task_of(config)
    examples, _ = load_examples(
        task,
        source=config.source,
        split=config.split,
        columns=config.columns,
        limit=config.limit,
        keep_unreadable=config.keep_unreadable,
    )
    rendered = [(example, _render(config, example, tokenizer, chat)) for example in examples]
    kept = [(example, ids) for example, ids in rendered if len(ids) <= config.max_prompt_tokens]
    _report_long(config, [example for example, ids in rendered if len(ids) > config.max_prompt_tokens])
    if len(kept) < at_least:
        raise DataError(
            f"{len(kept)} usable examples are fewer than the {at_least} prompts of one step: give more rows, raise "
            "data.max_prompt_tokens, or lower rollout.prompts_per_step"
        )
    return [
        Prompt(row, ids, tokenizer.decode(ids, skip_special_tokens=False), example, messages_of_prompt(config, example))
        for row, (example, ids) in enumerate(kept)
    ]


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

    def __len__(self) -> int:
        """Steps of the whole run, so that the run is one epoch wherever it starts."""
        return self.rollouts * self.updates

    def __iter__(self) -> Iterator[list[Prompt]]:
        for rollout in range(self.first, self.rollouts):
            rows = rollout_rows(len(self.prompts), self.per_rollout, self.seed, rollout)
            for _ in range(self.updates):
                yield [self.prompts[row] for row in rows]


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


def messages_of_prompt(config: DataConfig, example: Example) -> tuple[Message, ...]:
    """The chat messages of a row, as the recipe asks for them."""
    return tuple(messages_of(task_of(config), example, config.system_prompt, config.prompt_template))


def _render(config: DataConfig, example: Example, tokenizer: PreTrainedTokenizerBase, chat: Chat | None) -> list[int]:
    messages = messages_of_prompt(config, example)
    return render_prompt(tokenizer, messages) if chat is None else chat.prompt(messages)


def _report_long(config: DataConfig, examples: list[Example]) -> None:
    if examples:
        logger.warning(
            "%d prompts are longer than data.max_prompt_tokens=%d and are left out: %s",
            len(examples),
            config.max_prompt_tokens,
            ", ".join(example.id for example in examples[:5]),
        )
