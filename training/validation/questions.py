"""The questions of a run's validation: read, held against the training rows, and rendered. No torch on import.

The prompt is the one that trains, whatever task the questions are of, as in `qerl eval`. No prompt is left out for its
length: the engine is opened with room for the longest. A question that is also trained on is left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import ConfigError, DataError
from qerl.config.schema import DataConfig, RewardConfig, RunConfig
from qerl.data.examples import check_source, examples_of, load_examples
from qerl.data.rows import Source, sources_of
from qerl.data.sequences import Renderer
from qerl.data.tasks import Example, Task, for_episodes, get_task, task_of
from qerl.engine.interface import SamplingParams, check_tokens
from training.rewards.rewards import Rewards, RewardsOf, build_all_rewards, fixed_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.episodes.play import Environments
    from qerl.plan.sizes import ModelSizes
    from training.loss.groups import Prompt
    from training.rollout.sampler import Asking

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
    asking: Asking
    rewards: Rewards
    reward_names: Sequence[str]  # of the recipe's own
    accuracy: int | None

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and its completion."""
        return max(len(prompt.ids) for prompt in self.prompts) + self.asking.sampling.max_new_tokens


@dataclass(frozen=True)
class _Asked:
    """Which rows one source of validation has, and how they are asked and graded."""

    source: Source  # whose prompt and rewards they get
    task: Task
    rows: tuple[str | None, str, dict[str, str] | None]  # source, split and columns, as `load_examples` takes them
    held_out: int = 0  # so many of the training rows in place of `rows`

    @property
    def name(self) -> str:
        if self.held_out:
            return f"{self.source.data.source or self.source.data.task} ({self.held_out} rows held out)"
        return f"{self.rows[0] or self.task.name} ({self.rows[1]})"

    def examples(self, episodes: bool) -> list[Example]:
        if self.held_out:
            return examples_of(self.source.data, episodes)[-self.held_out :]
        task = for_episodes(self.task) if episodes else self.task
        return load_examples(task, *self.rows)[0]


def _asked(config: RunConfig) -> list[_Asked]:
    """What validations ask: of each source that says it, else what the section `validation` says."""
    found = []
    for source in sources_of(config.data, config.rewards):
        task, this = task_of(source.data), source.validation
        if this is not None:
            columns = None if this.source is None else source.data.columns
            found.append(_Asked(source, task, (this.source, config.validation.split, columns)))
        elif source.held_out:
            found.append(_Asked(source, task, (None, "", None), source.held_out))
    if found:
        return found
    only = Source("", 1.0, config.data.model_copy(update={"sources": ()}), config.rewards)
    this = config.validation  # a grader of the user's own is for the task that trains
    task = task_of(config.data) if this.task in (None, config.data.task) else get_task(this.task)
    return [_Asked(only, task, (this.source, this.split, None if this.source is None else config.data.columns))]


def check_rows(config: RunConfig) -> None:
    """Raise DataError or ConfigError for a source of validation rows that can be refused without reading all of it."""
    for asked in _asked(config):
        if not asked.held_out:
            _named(lambda asked=asked: check_source(asked.task, *asked.rows), asked.source)


def read_questions(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[Prompt],
    sizes: ModelSizes,
    run_dir: Path,
    environments: Environments | None = None,
) -> Questions:
    """The questions of a recipe that validates. Raises QerlError for what the base or the data refuse."""
    this = config.validation
    from training.rollout.sampler import Asking  # it imports torch

    sampling = SamplingParams(this.max_new_tokens or config.rollout.max_new_tokens, this.temperature)
    prompts, wanted = _questions(config, _asked(config), tokenizer, trained, sampling, environments)
    rewards = build_all_rewards(wanted, run_dir, environments.columns if environments else ())
    own = {reward.name for asked in _asked(config) for reward in asked.source.rewards}
    accuracy = rewards.names.index(GRADING) if GRADING in rewards.names else None
    names = [name for name in rewards.names if name != GRADING or GRADING in own]
    _check_metric(this.metric, names, accuracy is not None)
    _check_source_metric(this.metric, wanted)
    if environments is not None:
        new = sampling.max_new_tokens
        limits = replace(environments.limits, max_tokens=new, context=config.data.max_prompt_tokens + new)
        environments = replace(environments, limits=limits)
    name = ", ".join(asked.name for asked in _asked(config))
    asking = Asking(sampling, this.samples, environments)
    questions = Questions(name, prompts, asking, rewards, names, accuracy)
    check_tokens((prompt.ids for prompt in prompts), sizes.vocabulary)
    if sizes.positions is not None and questions.context > sizes.positions:
        raise ConfigError(
            f"a validation prompt and {sampling.max_new_tokens} new tokens are {questions.context} together, and the "
            f"model has {sizes.positions} positions: write validation.max_new_tokens: "
            f"{max(1, sampling.max_new_tokens - questions.context + sizes.positions)}, or shorter questions"
        )
    return questions


def _questions(
    config: RunConfig,
    of_sources: Sequence[_Asked],
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[Prompt],
    sampling: SamplingParams,
    environments: Environments | None,
) -> tuple[list[Prompt], list[RewardsOf]]:
    """The prompts of all sources, one source after another, and what their rewards are made of."""
    prompts, wanted = [], []
    for index, asked in enumerate(of_sources):
        examples = _named(partial(asked.examples, environments is not None), asked.source)
        examples = _unseen(asked.name, examples, trained, environments is not None)[: config.validation.limit]
        own = _prompts(asked.source.data, examples, tokenizer, environments)
        prompts += [replace(prompt, row=len(prompts) + prompt.row, source=index) for prompt in own]
        rows, fixed = (
            [prompt.example for prompt in own],
            fixed_columns(asked.task, sampling.max_new_tokens, config.run.steps),
        )
        rewards = _with_grading(asked.source.rewards, asked.task, rows)
        wanted.append(RewardsOf(asked.source.name, rewards, fixed, rows))
    return prompts, wanted


def _with_grading(rewards: Sequence[RewardConfig], task: Task, examples: Sequence[Example]) -> list[RewardConfig]:
    """The rewards with the task's grading among them; without it if there are no answers."""
    listed = any(reward.name == GRADING for reward in rewards)
    if listed or (task.grader is None and not all(example.answer for example in examples)):
        return list(rewards)
    return [*rewards, RewardConfig(name=GRADING, weight=0.0)]


def _named(read, source: Source):
    """What `read` returns; its errors say that they are about validation."""
    try:
        return read()
    except (DataError, ConfigError) as error:
        of = f" of source {source.name}" if source.name else ""
        raise type(error)(f"validation{of}: {error}; {REMEDY}") from error


def _unseen(name: str, examples: list[Example], trained: Sequence[Prompt], episodes: bool) -> list[Example]:
    """The examples whose question is not trained on; of `episodes`, whose row is not. Says in one line how many are."""

    def key(example: Example) -> str:
        row = [example.answer, sorted(example.extra.items())] if episodes else []
        return re.sub(r"\s+", "", example.question).casefold() + repr(row)

    known = {key(prompt.example) for prompt in trained}
    unseen = [example for example in examples if key(example) not in known]
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


def _prompts(
    data: DataConfig,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    environments: Environments | None = None,
) -> list[Prompt]:
    """The prompts, longest first, which saves padding; each one's `row` is its place in this list."""
    from training.rollout.prompts import prompts_of  # it imports torch

    renderer = Renderer(tokenizer, data.chat_template_kwargs, environments and environments.chat.prompt)
    prompts = sorted(prompts_of(task_of(data), examples, renderer), key=lambda prompt: -len(prompt.ids))
    return [replace(prompt, row=number) for number, prompt in enumerate(prompts)]


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


def _check_source_metric(metric: str, asked: Sequence[RewardsOf]) -> None:
    """Raise ConfigError if the metric is of a source that validations do not ask, or whose rows have no answers."""
    if not metric.startswith("sources/"):
        return
    _, name, what = metric.split("/")
    of_source = next((each for each in asked if each.name == name), None)
    if of_source is None:
        raise ConfigError(
            f"validation.metric is {metric}, and validations ask nothing of source {name}: give it held_out or "
            "validation, or write validation.metric: accuracy"
        )
    if what == "accuracy" and GRADING not in [reward.name for reward in of_source.wanted]:
        raise ConfigError(
            f"validation.metric is {metric}, and the rows of source {name} have no answers to grade by: write "
            f"validation.metric: sources/{name}/reward, or give answers or a grader"
        )
