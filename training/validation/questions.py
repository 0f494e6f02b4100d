"""The questions of a run's validation: read, held against the training rows, and rendered. No torch on import.

The prompt is the one that trains, whatever task the questions are of, as in `qerl eval`. No prompt is left out for its
length: the engine is opened with room for the longest. A question that is also trained on is left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.config.schema import RewardConfig
from qerl.data.examples import check_source
from qerl.engine.interface import SamplingParams, check_tokens
from qerl.errors import ConfigError, DataError
from qerl.tasks import Example, Message, Task, get_task, load_examples, messages_of, render_prompt, task_of
from qerl.tasks.own_grader import check_grader
from training.rewards.rewards import Rewards, build_rewards, fixed_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import RunConfig
    from qerl.environments.play import Environments
    from qerl.plan.sizes import ModelSizes
    from training.rollout.groups import Prompt

logger = logging.getLogger(__name__)

GRADING = "accuracy"  # the reward that is the task's grading
REMEDY = "name other rows with validation.source, or train without validation (--set validation.every=null)"


@dataclass(frozen=True)
class Questions:
    """What a validation asks, and how its answers are judged. `prompts` are in the order in which they are sampled.

    `rewards` are the recipe's over these rows; where they do not hold the task's grading, it follows with weight 0.
    `accuracy` is its place among them; None if the rows have no answers to grade by.
    """

    name: str
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    samples: int
    rewards: Rewards
    reward_names: Sequence[str]  # of the recipe's own
    accuracy: int | None
    environments: Environments | None = None

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and its completion."""
        return max(len(prompt.ids) for prompt in self.prompts) + self.sampling.max_new_tokens


def check_rows(config: RunConfig) -> None:
    """Raise DataError or ConfigError for a source of validation rows that can be refused without reading all of it."""
    if config.validation.every is not None:
        _named(lambda: check_source(_task(config), *_source(config)))


def read_questions(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[Prompt],
    sizes: ModelSizes,
    run_dir: Path,
    environments: Environments | None = None,
) -> Questions | None:
    """The questions of a recipe that validates, else None. Raises QerlError for what the base or the data refuse."""
    this = config.validation
    if this.every is None:
        return None
    task, name = _task(config), f"{this.source or (this.task or config.data.task)} ({this.split})"
    prompts = _prompts(config, _unseen(name, _examples(config, task), trained)[: this.limit], tokenizer, environments)
    examples = [prompt.example for prompt in prompts]
    sampling = SamplingParams(this.max_new_tokens or config.rollout.max_new_tokens, this.temperature)
    wanted, accuracy = _with_grading(config.rewards, task, examples)
    fixed = fixed_columns(task, sampling.max_new_tokens)
    rewards = build_rewards(wanted, fixed, examples, run_dir, environments is not None)
    names = rewards.names[: len(config.rewards)]
    _check_metric(this.metric, names, accuracy is not None)
    if environments is not None:
        new = sampling.max_new_tokens
        limits = replace(environments.limits, max_tokens=new, context=config.data.max_prompt_tokens + new)
        environments = replace(environments, limits=limits)
    questions = Questions(name, prompts, sampling, this.samples, rewards, names, accuracy, environments)
    check_tokens((prompt.ids for prompt in prompts), sizes.vocabulary)
    if sizes.positions is not None and questions.context > sizes.positions:
        raise ConfigError(
            f"a validation prompt and {sampling.max_new_tokens} new tokens are {questions.context} together, and the "
            f"model has {sizes.positions} positions: write validation.max_new_tokens: "
            f"{max(1, sampling.max_new_tokens - questions.context + sizes.positions)}, or shorter questions"
        )
    return questions


def _task(config: RunConfig) -> Task:
    """The task that grades. A grader of the user's own is for the task that trains."""
    task = config.validation.task
    return task_of(config.data) if task in (None, config.data.task) else get_task(task)


def _with_grading(
    rewards: Sequence[RewardConfig], task: Task, examples: Sequence[Example]
) -> tuple[list[RewardConfig], int | None]:
    """The rewards with the task's grading among them, and its place; without it if there are no answers."""
    check_grader(task, examples)
    own = next((place for place, reward in enumerate(rewards) if reward.name == GRADING), None)
    if own is not None:
        return list(rewards), own
    if task.grader is None and not all(example.answer for example in examples):
        return list(rewards), None
    return [*rewards, RewardConfig(name=GRADING, weight=0.0)], len(rewards)


def _source(config: RunConfig) -> tuple[str | None, str, dict[str, str] | None]:
    """Source, split and columns, as `load_examples` takes them."""
    this = config.validation
    own = this.source is not None and this.columns is None
    return this.source, this.split, config.data.columns if own else this.columns


def _examples(config: RunConfig, task: Task) -> list[Example]:
    keep = config.data.keep_unreadable
    examples, _ = _named(lambda: load_examples(task, *_source(config), keep_unreadable=keep))
    return examples


def _named(read):
    """What `read` returns; its errors say that they are about validation."""
    try:
        return read()
    except (DataError, ConfigError) as error:
        raise type(error)(f"validation: {error}; {REMEDY}") from error


def _unseen(name: str, examples: list[Example], trained: Sequence[Prompt]) -> list[Example]:
    """The examples whose question is not trained on. Says in one line how many are."""
    known = {_key(prompt.example.question) for prompt in trained}
    unseen = [example for example in examples if _key(example.question) not in known]
    seen = len(examples) - len(unseen)
    if not unseen:
        raise DataError(f"validation: all {seen} questions of {name} are among the training rows: {REMEDY}")
    if seen:
        logger.warning(
            "validation: %d of %d questions of %s are among the %d training rows and are left out",
            *(seen, len(examples), name, len(trained)),
        )
    else:
        logger.info("validation: none of the %d questions of %s is a training row", len(examples), name)
    return unseen


def _key(question: str) -> str:
    return re.sub(r"\s+", "", question).casefold()


def _prompts(
    config: RunConfig,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    environments: Environments | None = None,
) -> list[Prompt]:
    """The prompts, longest first, which saves padding; each one's `row` is its place in this list."""
    from training.rollout.groups import Prompt  # it imports torch

    data, trained = config.data, task_of(config.data)

    def asked(example: Example) -> tuple[Message, ...]:
        return tuple(messages_of(trained, example, data.system_prompt, data.prompt_template))

    def ids_of(example: Example) -> list[int]:
        return environments.chat.prompt(asked(example)) if environments else render_prompt(tokenizer, asked(example))

    rendered = sorted(((ids_of(example), example) for example in examples), key=lambda pair: -len(pair[0]))
    return [
        Prompt(row, ids, tokenizer.decode(ids, skip_special_tokens=False), example, asked(example))
        for row, (ids, example) in enumerate(rendered)
    ]


def _check_metric(metric: str, names: Sequence[str], has_accuracy: bool) -> None:
    if metric == "accuracy" and not has_accuracy:
        raise ConfigError(
            "validation.metric is accuracy, and the validation rows have no answers to grade by: write "
            "validation.metric: reward, or give answers or a grader (data.grader)"
        )
    if metric.startswith("rewards/") and metric.removeprefix("rewards/") not in names:
        raise ConfigError(
            f"validation.metric is {metric}, and there is no such reward: write accuracy, reward or "
            f"{', '.join(f'rewards/{name}' for name in names)}"
        )
