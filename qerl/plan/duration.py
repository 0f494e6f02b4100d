"""How long a whole run takes: with full lengths, and with those that its completions and prompts are likely to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import mul
from statistics import mean
from typing import TYPE_CHECKING, Any

from qerl.base.errors import ConfigError, QerlError
from qerl.data.rows import sources_of
from qerl.plan.plan import Plan
from qerl.plan.seconds import Lengths, full_lengths, step_seconds

if TYPE_CHECKING:
    from qerl.config.schema import DataConfig, RunConfig
    from qerl.data.tasks import Task

MEAN_COMPLETION = 0.25  # of rollout.max_new_tokens; an assumption, which the plan states
CHARACTERS = 4  # per token of English text
TEMPLATE = 20  # tokens that a chat template adds to a prompt
PEEK = 200  # rows whose prompts are looked at


@dataclass(frozen=True)
class Likely:
    """Lengths that a run is likely to have; `prompts` says where the prompts' is from."""

    lengths: Lengths
    prompts: str


def likely(config: RunConfig, mean_completion: float = MEAN_COMPLETION, prompts: Sequence[int] | None = None) -> Likely:
    """Completions of `mean_completion` tokens, or that share of the longest if it is at most 1.

    `prompts` are the tokens of the run's prompts; without them they are estimated from the text of its first rows, or
    taken to be full if its rows are on the hub. Raises ConfigError for a mean that no run can have.
    """
    longest = config.rollout.max_new_tokens
    new = mean_completion * longest if mean_completion <= 1 else mean_completion
    if not 0 < new <= longest:
        raise ConfigError(
            f"--mean-completion {mean_completion:g} is no mean of completions of at most {longest} tokens "
            "(rollout.max_new_tokens): write tokens, such as 300, or a share of the longest, such as 0.25"
        )
    if prompts:
        return Likely(Lengths(mean(prompts), new), f"as its {len(prompts)} prompts have")
    texts = _first_prompts(config)
    if all(texts):
        weights = [source.weight for source in sources_of(config)]
        lengths = [mean(map(len, own)) for own in texts]
        characters = sum(map(mul, weights, lengths)) / sum(weights)
        tokens = characters / CHARACTERS + TEMPLATE
        where = f"estimated from the text of {sum(map(len, texts))} rows"
        return Likely(Lengths(min(tokens, config.data.max_prompt_tokens), new), where)
    return Likely(Lengths(config.data.max_prompt_tokens, new), "the most that they may have: its rows are not here")


def duration(config: RunConfig, made: Plan, expected: Likely) -> list[str]:
    """Steps and hours of the run in words, first with full lengths, then with the expected ones."""
    steps, expect = config.run.steps, expected.lengths
    if config.sft is not None:
        longest = in_words(steps * sum(made.seconds.values()))
        return [f"All {steps} steps take {longest} if every row has sft.max_tokens tokens; shorter rows take less."]
    full, shorter = (
        steps * sum(step_seconds(config, made.sizes, made.card, made.micro_batches, lengths).values())
        for lengths in (full_lengths(config), expect)
    )
    discarded = ", and what dynamic sampling discards comes on top" if config.rollout.dynamic_sampling.enabled else ""
    return [
        f"All {steps} steps take {in_words(full)} if completions and prompts have their full length.",
        f"They take {in_words(shorter)} if completions have {expect.new:.0f} tokens on average "
        f"(--mean-completion) and prompts {expect.prompt:.0f} ({expected.prompts}){discarded}.",
    ]


def in_words(seconds: float) -> str:
    """Minutes, hours, or hours and days, whichever reads best."""
    hours = seconds / 3600
    if hours < 1.5:
        return f"{seconds / 60:.0f} minutes" if seconds >= 120 else "less than 2 minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours:.0f} hours ({hours / 24:.1f} days)"


def _first_prompts(config: RunConfig) -> list[list[str]]:
    """The text of each source's first prompts; none of rows that cannot be read, or not without network."""
    return [_first_of(source.data) for source in sources_of(config)]


def _first_of(data: DataConfig) -> list[str]:
    from qerl.data.tasks import build_messages, get_task

    task = get_task(data.task)
    try:
        questions = [text for row in _first_rows(data, task) if (text := _question(row, data, task))]
    except QerlError:
        return []
    messages = [build_messages(task, text, data.system_prompt, data.prompt_template) for text in questions]
    return ["".join(message["content"] for message in each) for each in messages]


def _first_rows(data: DataConfig, task: Task) -> list[Mapping[str, Any]]:
    """The first rows of a file, or of a task that makes its own; none of a data set on the hub."""
    from qerl.data.rows import is_local, local_rows

    if data.source is not None:
        rows = (row for _, row in local_rows(data.source, data.split)) if is_local(data.source) else iter(())
    else:
        rows = iter(task.generate(data.split) if task.generate is not None else ())
    return [row for row in islice(rows, PEEK) if row is not None]


def _question(row: Mapping[str, Any], data: DataConfig, task: Task) -> str:
    """The text of a row's question, or of its messages; empty for a column that lies deeper than that."""
    own = task.columns["question"]
    names = [(data.columns or {}).get("question"), *((own,) if isinstance(own, str) else own), "question"]
    cell = next((row[name] for name in names if name in row), "")
    if isinstance(cell, list):
        return "".join(str(each.get("content", "")) for each in cell if isinstance(each, Mapping))
    return str(cell)
