"""The rewards that come with qerl. Each takes columns of a batch by name and returns one float per completion.

The columns are completions (text), completion_ids (token ids), prompts (rendered text), question, answer, row (the same
number for all completions of one prompt), task, max_new_tokens, step, and the data set's other columns by their names.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

from qerl.base.errors import ConfigError
from qerl.data.grading.grade import grade_many
from qerl.data.tasks import Task

# The quantifiers are possessive (*+) so that matching takes linear time: with \s*, a completion that consists of line
# breaks only takes quadratic time.
_TAGS = re.compile(
    r"\s*+(?:<think>)?+((?:(?!</?think>).)*+)</think>\s*+<answer>((?:(?!</?answer>).)*+)</answer>\s*+", re.DOTALL
)
_THINK = re.compile(r"\s*+(?:<think>)?+((?:(?!</?think>).)*+)</think>((?:(?!</?think>).)*+)", re.DOTALL)
_BOX = re.compile(r"\\boxed\s*\{(?=\s*[^\s}])")


def accuracy(
    completions: Sequence[str],
    answer: Sequence[str],
    task: Task,
    question: Sequence[str] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float]:
    """1 for a correct completion, 0 for any other, by the same grade as in evaluation. Logs why completions failed.

    A grader of the user's own (`data.grader`) may also give numbers between.
    """
    if task.grader is not None:
        given = {**columns, "log_metric": log_metric}
        return [grade.value for grade in grade_many(task, completions, answer, question, given)]
    grades = grade_many(task, completions, answer, question)
    if log_metric is not None:
        reasons = Counter(grade.reason for grade in grades)
        log_metric("grades/no_answer_share", reasons["no_answer"] / len(grades))
        refused = reasons["too_long"] + reasons["timeout"] + reasons["unparsable"] + reasons["bad_answer"]
        log_metric("grades/refused_share", refused / len(grades))
    return [float(grade.correct) for grade in grades]


def environment(completions: Sequence[str], episode_reward: Sequence[float] = (), **_: Any) -> list[float]:
    """What the environment gave over the steps of an episode; 0 for a completion of no episode, as in a dry run."""
    return list(episode_reward) or [0.0] * len(completions)


def format(completions: Sequence[str], style: Literal["boxed", "tags", "think"] = "boxed", **_: Any) -> list[float]:
    """1 for a completion that has the form that the prompt asks for, else 0.

    "boxed": exactly one `\\boxed{...}`, which is not empty. "tags": `<think>...</think> <answer>...</answer>` and
    nothing else. "think": one thought, then some text after `</think>`. The opening `<think>` may be part of the
    prompt.
    """
    checks: dict[str, Callable[[str], bool]] = {
        "boxed": lambda text: len(_BOX.findall(text)) == 1,
        "tags": lambda text: _filled(_TAGS, text),
        "think": lambda text: _filled(_THINK, text),
    }
    if style not in checks:
        raise ConfigError(f"reward format has no style {style!r}: write one of {', '.join(checks)}")
    return [float(checks[style](text)) for text in completions]


def _filled(pattern: re.Pattern[str], text: str) -> bool:
    match = pattern.fullmatch(text)
    return match is not None and all(group.strip() for group in match.groups())


def soft_overlong(
    completion_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    cache: int | None = None,
    max_length: int | None = None,
    **_: Any,
) -> list[float]:
    """DAPO's soft punishment of long completions (arXiv 2503.14476, eq. 13).

    The reward is 0 up to max_length - cache tokens, then falls linearly to -1 at max_length tokens, and stays there.
    `max_length` defaults to the recipe's max_new_tokens, and `cache` to a fifth of it (4096 of 20480 in the paper).
    """
    longest = max_new_tokens if max_length is None else max_length
    cache = max(1, longest // 5) if cache is None else cache
    if not 0 < cache < longest:
        raise ConfigError(
            f"reward soft_overlong has cache {cache}, which has to lie between 0 and {longest} "
            "(rollout.max_new_tokens): write args: {cache: N}, or leave it out for a fifth of that"
        )
    return [min(0.0, max(-1.0, (longest - cache - len(ids)) / cache)) for ids in completion_ids]


def length(
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    row: Sequence[int],
    task: Task,
    question: Sequence[str] | None = None,
    **columns: Any,
) -> list[float]:
    """Reward completions that are shorter than the others of their prompt (Kimi k1.5, arXiv 2501.12599, section 2.3.3).

    With l the lengths of a group in tokens, lambda = 0.5 - (l - min l) / (max l - min l). A correct completion gets
    lambda, any other min(0, lambda). If all lengths of a group are equal, lambda is 0.
    """
    lengths_by_row: dict[int, list[int]] = defaultdict(list)
    for group, ids in zip(row, completion_ids, strict=True):
        lengths_by_row[group].append(len(ids))
    rewards = []
    grades = grade_many(task, completions, answer, question, {**columns, "completion_ids": completion_ids, "row": row})
    for grade, group, ids in zip(grades, row, completion_ids, strict=True):
        shortest, longest = min(lengths_by_row[group]), max(lengths_by_row[group])
        share = 0.5 - (len(ids) - shortest) / (longest - shortest) if longest > shortest else 0.0
        rewards.append(share if grade.correct else min(0.0, share))
    return rewards


def code(**_: Any) -> list[float]:
    """Always raises ConfigError: running what a model wrote needs a sandbox, which qerl does not bring."""
    raise ConfigError(
        "there is no reward for code: running what a model wrote needs a sandbox, which qerl does not bring; write a "
        "function that calls yours, and name it as path/to/file.py:function"
    )
