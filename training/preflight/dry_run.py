"""`qerl train --dry-run`: show the plan, the data and the rewards of a run without training anything."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from qerl.checkpoint.load import local_folder
from qerl.checkpoint.resolve import starting_model
from qerl.data.rows import sources_of
from qerl.data.tasks import grade, task_of
from training.preflight.advice import Likely, likely
from training.preflight.checks import read_given, read_prompts, sizes_at
from training.preflight.plan import validation_count
from training.preflight.start import settle_start
from training.rewards.rewards import rewards_of_run
from training.validation.questions import Questions, read_questions

if TYPE_CHECKING:
    from rich.console import Console

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from qerl.data.tasks import Task
    from training.loss.groups import Prompt
    from training.rewards.rewards import Reward

logger = logging.getLogger(__name__)

ROWS = 5
ShowPlan = Callable[["RunConfig", str, "Console", Likely], bool]  # prints a plan and says whether the run would fit


def dry_run(config: RunConfig, console: Console, show_plan: ShowPlan) -> bool:
    """Print data, rewards and, by `show_plan`, the plan; return whether the run would fit.

    For the first rows the rewards are given the answer itself and an empty completion. Raises the errors that the run
    itself would raise for its model, adapter, data or rewards.
    """
    config, base = settle_start(config, starting_model(config.model.base, config.model.format, config.kind.packs))
    if config.sft is not None:
        return _dry_run_of_rows(config, base, console, show_plan)
    tokenizer, prompts, environments = read_prompts(config, base)
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    console.print(
        f"data: {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, half of them under "
        f"{lengths[len(lengths) // 2]}; a run of {config.run.steps} steps samples "
        f"{config.run.steps * config.rollout.prompts_per_step}",
        highlight=False,
        soft_wrap=True,
    )
    written = Path(mkdtemp(prefix="qerl-dry-run-"))
    try:
        rewards = rewards_of_run(config, prompts, written, environments.columns if environments else ())
        if questions := read_questions(config, tokenizer, prompts, sizes_at(base), written, environments):
            console.print(_validation_text(config, questions), highlight=False, soft_wrap=True)
        for index, source in enumerate(sources_of(config)):
            own = [prompt for prompt in prompts if prompt.source == index]
            if source.name:
                console.print(_source_text(config, index, own), highlight=False, soft_wrap=True)
            functions = [rewards.functions[i] for i in rewards.of_source(index)]
            console.print(reward_table(task_of(source.data), own, functions))
    finally:
        if not any(written.iterdir()):  # else an error names a file in it
            shutil.rmtree(written)
    return show_plan(config, str(local_folder(base.base)), console, likely(config, prompts=lengths))


def _dry_run_of_rows(config: RunConfig, base: ModelRef, console: Console, show_plan: ShowPlan) -> bool:
    """The same for a run on given conversations: how long they are, and what of the first is learned."""
    tokenizer, rows = read_given(config, base)
    lengths = sorted(len(row.ids) for row in rows.trained)
    learned = sum(sum(row.learned) for row in rows.trained) / sum(lengths)
    first = rows.trained[0]
    text = tokenizer.decode([token for token, wanted in zip(first.ids, first.learned, strict=True) if wanted])
    lines = [
        f"data: {len(lengths)} rows of {lengths[0]} to {lengths[-1]} tokens, half of them under "
        f"{lengths[len(lengths) // 2]}, {learned:.0%} of all tokens learned; a run of {config.run.steps} steps takes "
        f"{config.run.steps * config.sft.rows_per_step}",
        f"learned of row {first.id}: {text!r:.400}",
        *([f"validation: {len(rows.held_out)} rows, {validation_count(config)} times"] if rows.held_out else []),
    ]
    console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)
    return show_plan(config, str(local_folder(base.base)), console, likely(config))


def _validation_text(config: RunConfig, questions: Questions) -> str:
    lengths = sorted(len(prompt.ids) for prompt in questions.prompts)
    return (
        f"validation: {len(lengths)} questions of {questions.name}, prompts of {lengths[0]} to {lengths[-1]} tokens; "
        f"{validation_count(config)} times in a run of {config.run.steps} steps"
    )


def _source_text(config: RunConfig, index: int, prompts: Sequence[Prompt]) -> str:
    sources = sources_of(config)
    share = sources[index].weight / sum(source.weight for source in sources)
    of_step = share * config.rollout.prompts_per_step
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    return (
        f"source {sources[index].name}: {share:.1%} of each step, {of_step:.3g} prompts on "
        f"average; {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens"
    )


def reward_table(task: Task, prompts: Sequence[Prompt], rewards: Sequence[Reward]):
    """A table of the rewards that the first rows get for the answer itself and for an empty completion."""
    from rich.table import Table

    examples = [prompt.example for prompt in prompts[:ROWS]]
    right = [_graded_right(task, example.answer) for example in examples]
    table = Table("row", "answer", *(f"{f.__name__}: answer / empty" for f in rewards), box=None)
    columns = [_score(rewards, prompts, texts) for texts in (right, [""] * len(examples))]
    for index, example in enumerate(examples):
        cells = [f"{given[index]:g} / {empty[index]:g}" for given, empty in zip(*columns, strict=True)]
        table.add_row(example.id, _shown(example.answer), *cells)
    return table


def _graded_right(task: Task, answer: str) -> str:
    """A completion that is graded right, if there is one; else the bare answer, so that the table shows the problem."""
    texts = (f"\\boxed{{{answer}}}", answer)
    return next((text for text in texts if grade(task, text, answer).correct), answer)


def _shown(answer: str) -> str:
    """The answer in one line, or its end, where a worked solution has its result."""
    text = " ".join(answer.split())
    return text if len(text) <= 40 else f"...{text[-37:]}"


def _score(rewards: Sequence[Reward], prompts: Sequence[Prompt], completions: Sequence[str]) -> list[list[float]]:
    asked = prompts[: len(completions)]
    rows, texts = [prompt.row for prompt in asked], [prompt.text for prompt in asked]
    ids = [[0] * max(len(text.split()), 1) for text in completions]
    return [
        list(function(prompts=texts, completions=list(completions), completion_ids=ids, row=rows))
        for function in rewards
    ]
