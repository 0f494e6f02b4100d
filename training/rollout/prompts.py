"""Examples -> prompts: what each step trains on, as a pure function of (seed, step).

The prompt is built by `qerl.tasks`, the same code that evaluation uses, and kept as token ids, so that no second
template can slip in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

from qerl.errors import DataError
from qerl.tasks import build_messages, get_task, load_examples, render_prompt
from training.rollout.noise import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import DataConfig
    from qerl.tasks import Example

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run. `dataset` has the columns "prompt" (rendered text) and "row" (index into `examples`)."""

    examples: list[Example]
    dataset: Dataset
    ids_by_text: dict[str, list[int]]


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, at_least: int) -> Prompts:
    """Read the examples, render their prompts, and drop the over-long ones (counted and named).

    Raises DataError if fewer than `at_least` (the prompts of one step) are left.
    """
    task = get_task(config.task)
    examples, _ = load_examples(
        task, source=config.source, split=config.split, columns=config.columns, limit=config.limit
    )
    rendered = [(example, *_render(config, example, tokenizer)) for example in examples]
    kept = [row for row in rendered if len(row[2]) <= config.max_prompt_tokens]
    _report_long(config, [example for example, _, ids in rendered if len(ids) > config.max_prompt_tokens])
    if len(kept) < at_least:
        raise DataError(
            f"{len(kept)} usable examples are fewer than the {at_least} prompts of one step: give more rows, raise "
            "data.max_prompt_tokens, or lower rollout.prompts_per_step"
        )
    from datasets import Dataset

    dataset = Dataset.from_dict({"prompt": [text for _, text, _ in kept], "row": list(range(len(kept)))})
    return Prompts([example for example, _, _ in kept], dataset, {text: ids for _, text, ids in kept})


class PromptSampler(Sampler[int]):
    """Rows in training order: rollout r takes the next `prompts_per_step` of an endless sequence of permutations.

    Each row stands `group_size` times in a row, and the whole rollout `repeats` times, since TRL's loader fetches the
    rollout's rows anew for each micro-batch. Starting at rollout r gives what a run from 0 would see there.
    """

    def __init__(
        self, rows: int, prompts_per_step: int, group_size: int, repeats: int, rollouts: int, seed: int, start: int = 0
    ) -> None:
        self._rows = rows
        self._prompts_per_step = prompts_per_step
        self._group_size = group_size
        self._repeats = repeats
        self._rollouts = rollouts
        self._seed = seed
        self._start = start

    def __len__(self) -> int:
        """Indices of the whole run, so that the run is one epoch wherever it starts."""
        return self._rollouts * self._prompts_per_step * self._group_size * self._repeats

    def __iter__(self) -> Iterator[int]:
        rollout = self._start
        while True:  # the trainer stops by its step count; its loader reads one batch ahead
            rows = rollout_rows(self._rows, self._prompts_per_step, self._seed, rollout)
            for _ in range(self._repeats):
                for row in rows:
                    yield from [row] * self._group_size
            rollout += 1


def rollout_rows(rows: int, prompts_per_step: int, seed: int, rollout: int) -> list[int]:
    """The row numbers of one rollout's prompts: a slice of permutations laid end to end."""
    first = rollout * prompts_per_step
    picked: list[int] = []
    while len(picked) < prompts_per_step:
        position = first + len(picked)
        generator = torch.Generator().manual_seed(derive_seed(seed, position // rows, "data"))
        permutation = torch.randperm(rows, generator=generator)
        picked += permutation[position % rows :][: prompts_per_step - len(picked)].tolist()
    return picked


def _render(config: DataConfig, example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    messages = build_messages(get_task(config.task), example.question, config.system_prompt, config.prompt_template)
    ids = render_prompt(tokenizer, messages)
    return tokenizer.decode(ids, skip_special_tokens=False), ids


def _report_long(config: DataConfig, examples: list[Example]) -> None:
    if examples:
        logger.warning(
            "%d prompts are longer than data.max_prompt_tokens=%d and are left out: %s",
            len(examples),
            config.max_prompt_tokens,
            ", ".join(example.id for example in examples[:5]),
        )
