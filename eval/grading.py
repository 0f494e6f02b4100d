"""Grade a batch of completions, by the task or by the grader of the user's own that the evaluation was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qerl.base.errors import RewardError
from qerl.base.own.function import LateError, OwnFunctionError, first_to_fail
from qerl.base.own.process import ReturnedError
from qerl.data.grading.grade import Grade, grade_many
from qerl.data.tasks import Task

if TYPE_CHECKING:
    from eval.plan import Plan
    from eval.store import Key
    from qerl.engine.interface import Completion


def graded(plan: Plan, batch: Sequence[Key], completions: Sequence[Completion], texts: list[str]) -> list[Grade]:
    """The grades of a batch. Raises RewardError, which names the completion on which a grader fails."""
    examples = [plan.examples[row] for row, _ in batch]
    questions, answers = [one.question for one in examples], [one.answer for one in examples]
    if plan.task.grader is None:
        return grade_many(plan.task, texts, answers, questions)
    names = dict.fromkeys(key for example in examples for key in example.extra)
    columns = {
        **{name: [example.extra.get(name) for example in examples] for name in names},
        "completions": texts,
        "completion_ids": [list(completion.token_ids) for completion in completions],
        "prompts": [plan.tokenizer.decode(plan.prompts[row], skip_special_tokens=False) for row, _ in batch],
        "question": questions,
        "answer": answers,
        "row": [row for row, _ in batch],
    }
    limit = plan.sampling.max_new_tokens
    fixed = {"max_new_tokens": limit, "step": plan.settings.step or 0, "log_metric": _log_nothing}
    try:
        return _call(plan.task, columns, fixed)
    except (OwnFunctionError, ReturnedError) as error:
        index = error.index if error.index is not None else _first_to_fail(plan.task, columns, fixed, error)
        where = "" if index is None else f" for the completion {texts[index][:60]!r} of row {examples[index].id}"
        late = " within --grader-timeout-s" if isinstance(error, LateError) else ""
        raise RewardError(
            f"grader {plan.task.grader} {error}{where}: a grader has to return a number from 0 to 1, or True or False, "
            f"for each completion{late}; correct it, then the same command continues"
        ) from error


def _call(task: Task, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any]) -> list[Grade]:
    others = {name: values for name, values in columns.items() if name not in ("completions", "answer", "question")}
    return grade_many(task, columns["completions"], columns["answer"], columns["question"], {**others, **fixed})


def _first_to_fail(
    task: Task, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any], error: Exception
) -> int | None:
    if isinstance(error, ReturnedError):
        return None

    def call(index: int, timeout_s: float) -> None:
        one = {name: [values[index]] for name, values in columns.items()}
        _call(replace(task, grader_timeout_s=timeout_s), one, fixed)

    return first_to_fail(call, len(columns["completions"]), task.grader_timeout_s)


def _log_nothing(_name: str, _value: float) -> None:
    """The `log_metric` that a grader gets in an evaluation."""
