"""`qerl train --dry-run`: show the plan, the data and the rewards of a run without training anything."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from rich.table import Table

from qerl.base.isolate import closed_at_end
from qerl.checkpoint.load import local_folder
from qerl.data.grading.grade import grade
from qerl.data.rows import sources_of
from qerl.data.tasks import Task, task_of
from qerl.engine.interface import Completion, SamplingParams
from training.preflight.advice import Likely, likely
from training.preflight.checks import read_given, read_prompts, sizes_at
from training.preflight.plan import validation_count
from training.preflight.start import settle_start
from training.rewards.rewards import Reward, rewards_of_run
from training.run_dir.resume import starting_base
from training.validation.questions import Questions, read_questions

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from qerl.engine.interface import Source
    from qerl.episodes.endpoint import Chat
    from qerl.episodes.play import Environments
    from training.loss.groups import Prompt, Sample

logger = logging.getLogger(__name__)

ROWS = 5
LEARNED = ">>>", "<<<"  # around what is learned of a row
ShowPlan = Callable[["RunConfig", str, "Console", Likely], bool]  # prints a plan and says whether the run would fit


@closed_at_end()
def dry_run(config: RunConfig, console: Console, show_plan: ShowPlan) -> bool:
    """Print data, rewards and, by `show_plan`, the plan; return whether the run would fit.

    For the first rows the rewards are given the answer itself and an empty completion; with an environment, episodes
    in which the model says these in each turn. Raises the errors that the run itself would raise for its model,
    adapter, data or rewards.
    """
    config, base = settle_start(config, starting_base(config))
    if not config.kind.samples:
        return _dry_run_of_rows(config, base, console, show_plan)
    tokenizer, prompts, environments = read_prompts(config, base)
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(
        f"data: {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, half of them under "
        f"{lengths[len(lengths) // 2]}; a run of {config.run.steps} steps samples "
        f"{config.run.steps * config.rollout.prompts_per_step}"
    )
    written = Path(mkdtemp(prefix="qerl-dry-run-"))
    try:
        rewards = rewards_of_run(config, prompts, written, environments.columns if environments else ())
        if config.validation.every is not None:
            questions = read_questions(config, tokenizer, prompts, sizes_at(base), written, environments)
            say(_validation_text(config, questions))
        for index, source in enumerate(sources_of(config.data, config.rewards)):
            own = [prompt for prompt in prompts if prompt.source == index]
            if source.name:
                say(_source_text(config, index, own))
            functions = [rewards.functions[i] for i in rewards.of_source(index)]
            console.print(reward_table(task_of(source.data), own, functions, environments))
        say(_first_text(tokenizer, prompts[0], environments))
    finally:
        if not any(written.iterdir()):  # else an error names a file in it
            shutil.rmtree(written)
    return show_plan(config, str(local_folder(base.base)), console, likely(config, prompts=lengths))


def _dry_run_of_rows(config: RunConfig, base: ModelRef, console: Console, show_plan: ShowPlan) -> bool:
    """The same for a run on given conversations: how long they are, and what is learned of the first."""
    tokenizer, rows = read_given(config, base)
    lengths = sorted(len(row.ids) for row in rows.trained)
    learned = sum(sum(row.learned) for row in rows.trained) / sum(lengths)
    first = rows.trained[0]
    lines = [
        f"data: {len(lengths)} rows of {lengths[0]} to {lengths[-1]} tokens, half of them under "
        f"{lengths[len(lengths) // 2]}, {learned:.0%} of all tokens learned; a run of {config.run.steps} steps takes "
        f"{config.run.steps * config.sft.rows_per_step}",
        f"row {first.id}, of which the model learns what stands between {LEARNED[0]} and {LEARNED[1]}:",
        _marked_text(tokenizer, first.ids, first.learned),
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
    sources = sources_of(config.data, config.rewards)
    share = sources[index].weight / sum(source.weight for source in sources)
    of_step = share * config.rollout.prompts_per_step
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    return (
        f"source {sources[index].name}: {share:.1%} of each step, {of_step:.3g} prompts on "
        f"average; {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens"
    )


def _marked_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], learned: Sequence[int]) -> str:
    """The text of a row, with marks around each part that is learned."""
    parts = []
    for wanted, group in groupby(zip(ids, learned, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        parts.append(text.join(LEARNED) if wanted else text)
    return "".join(parts)


def _first_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, environments: Environments | None) -> str:
    """The first prompt as the model is asked it, and what is learned of what follows; an episode if there are any."""
    if environments is None:
        asked = tokenizer.decode(prompt.ids, skip_special_tokens=False)
        head = f"prompt of row {prompt.example.id}, {len(prompt.ids)} tokens"
        return f"{head}; the model learns the completion that follows it:\n{asked}"
    said = prompt.example.answer or prompt.example.question
    (sample,) = _episodes(environments, [prompt], [said])
    episode = sample.episode
    ends = f"failed: its environment {episode.error}" if episode.error else f"reward {episode.reward:g}"
    return "\n".join(
        [
            f"prompt of row {prompt.example.id}, {len(episode.prompt_ids)} tokens; the model learns its own turns, and "
            "not what the environment says:",
            tokenizer.decode(episode.prompt_ids, skip_special_tokens=False),
            f"an episode in which it says {_shown(said)!r} in each turn ({ends}):",
            *(f"{turn.role}: {turn.text}" for turn in episode.turns),
        ]
    )


def reward_table(
    task: Task, prompts: Sequence[Prompt], rewards: Sequence[Reward], environments: Environments | None = None
):
    """A table of the rewards that the first rows get for the answer itself and for an empty completion.

    A row without an answer is given its own question back.
    """
    asked = prompts[:ROWS]
    answered = any(prompt.example.answer for prompt in asked)
    right = [p.example.answer or p.example.question for p in asked]
    if answered and not environments:
        right = [_graded_right(task, answer) for answer in right]
    given = "answer" if answered else "the question"
    table = Table("row", given, *(f"{f.__name__}: {given} / empty" for f in rewards), box=None)
    columns = [_score(rewards, asked, texts, environments) for texts in (right, [""] * len(asked))]
    for index, prompt in enumerate(asked):
        cells = [f"{_number(said[index])} / {_number(empty[index])}" for said, empty in zip(*columns, strict=True)]
        table.add_row(prompt.example.id, _shown(prompt.example.answer or prompt.example.question), *cells)
    return table


def _number(reward: float) -> str:
    return "none" if math.isnan(reward) else f"{reward:g}"


def _graded_right(task: Task, answer: str) -> str:
    """A completion that is graded right, if there is one; else the bare answer, so that the table shows the problem."""
    texts = (f"\\boxed{{{answer}}}", answer)
    return next((text for text in texts if grade(task, text, answer).correct), answer)


def _shown(answer: str) -> str:
    """The answer in one line, or its end, where a worked solution has its result."""
    text = " ".join(answer.split())
    return text if len(text) <= 40 else f"...{text[-37:]}"


def _score(
    rewards: Sequence[Reward], prompts: Sequence[Prompt], completions: Sequence[str], environments: Environments | None
) -> list[list[float]]:
    from training.rewards.grading import columns_of_episodes

    samples = _episodes(environments, prompts, completions) if environments else []
    columns = {
        "prompts": [prompt.text for prompt in prompts],
        "completions": list(completions),
        "completion_ids": [[0] * max(len(text.split()), 1) for text in completions],
        "row": [prompt.row for prompt in prompts],
        **columns_of_episodes(samples),
    }
    return [list(function(**columns)) for function in rewards]


def _episodes(environments: Environments, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Sample]:
    """The episodes in which the model says the same text in each of its turns."""
    from training.rollout.sampler import Asking

    asking = Asking(SamplingParams(environments.limits.max_tokens), 1, environments)
    groups = asking.groups(_Saying(environments.chat, texts), prompts, seed=0)
    return [sample for group in groups for sample in group.samples]


class _Saying:
    """An engine that says one text in all turns of an episode."""

    def __init__(self, chat: Chat, texts: Sequence[str]) -> None:
        self._said = [chat.said(text) for text in texts]

    def run(self, source: Source, seed: int) -> None:
        while requests := source.begin(wait=True, together=True):
            for request in requests:
                said, most = self._said[request.index], request.sampling.max_new_tokens
                ids = said[:most]
                source.finished(
                    request.index, Completion(ids, [0.0] * len(ids), "stop" if len(said) <= most else "length")
                )
