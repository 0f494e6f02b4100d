"""The grade that reward and evaluation share: extract the answer of a completion and compare it with the task's.

Numbers are compared as exact fractions, other mathematics part by part and at random points
(qerl/data/formulas/equality.py). What this does not understand goes to math-verify, in a worker with a time limit. An
answer that only repeats the question's expression is wrong (qerl/data/formulas/copies.py). Algebra is loaded with the
first answer that needs it. Where the task's answers are
text, what a completion marks, or else its last line, has to be that text, apart from case, white space and marks.

A grader of the user's own replaces all of this: `grade(completion, answer, **row)` returns True, False, or a number
from 0 to 1, which counts as correct from 0.5 on. With a parameter `completions` it gets lists and returns one. It is
called as own rewards are (qerl/base/own_function.py).
"""

import inspect
import itertools
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from qerl.base.errors import ConfigError
from qerl.base.isolate import ReturnedError, short
from qerl.base.own_function import Named, OwnFunction, check_columns, own_function
from qerl.base.program import PYTHON, GivenFunction, given_function
from qerl.data.formulas.number import parse_number
from qerl.data.formulas.spelling import strip_math, tidy
from qerl.data.grading.extract import MAX_ANSWER_CHARS, extract, without_remark
from qerl.data.tasks import Example, Task, get_task

_AROUND = " \t\n*_`\"'“”‘’.。,;:!?()[]"


def _same(text: str, answer: str) -> bool:
    one, other = _plain(text), _plain(answer)
    if one == other:
        return True
    numbers = parse_number(one), parse_number(other)
    return None not in numbers and numbers[0].equals(numbers[1])


def _plain(text: str) -> str:
    """Without what does not change the meaning: case, white space, marks around it."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    bare = plain.strip(_AROUND) or plain
    at = plain.find(bare)
    return f".{bare}" if bare[:1].isdigit() and plain[:at].endswith(".") else bare  # .5 is not 5


FUNCTION = "grade"  # where a grader names a file alone
CORRECT_FROM = 0.5
OTHER = "path/to/file.py, whose function `grade` is then taken"


def find_grader(task: Task, fresh: bool = True) -> OwnFunction | GivenFunction:
    """The function that grades the task, as its files are now if `fresh`. Raises ConfigError."""
    name = task.grader if not task.grader.endswith(".py") else f"{task.grader}:{FUNCTION}"
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not attribute.isidentifier():
        raise ConfigError(f"grader {name!r} names no function: write path/to/file.py, or path/to/file.py:function")
    if place == PYTHON:
        return given_function("grader", attribute)
    return own_function(place, attribute, Named("grader", task.grader, OTHER), task.grader_timeout_s, fresh)


def check_grader(task: Task, examples: Sequence[Example] = (), further: Sequence[str] = ()) -> None:
    """Raise ConfigError if the task's grader cannot be loaded, or asks for a column that these examples lack.

    `further` are the columns of episodes, where there are any.
    """
    if task.grader is None:
        return
    function = find_grader(task)
    parameters = inspect.signature(function).parameters
    if examples:
        extra = {key for example in examples for key in example.extra}
        check_columns(f"grader {task.grader}", parameters, (), extra, further)


def scores(task: Task, columns: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]) -> list[float]:
    """A number from 0 to 1 for each completion. Raises OwnFunctionError and ReturnedError.

    `columns` has a value for each completion, `fixed` arguments that are the same for all of them.
    """
    function = find_grader(task, fresh=False)
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        columns, fixed = ({key: given[key] for key in given if key in names} for given in (columns, fixed))
    values = function(len(next(iter(columns.values()), ())), task.grader_timeout_s, fixed, **columns)
    for index, value in enumerate(values):
        if not 0 <= value <= 1:
            value = None if math.isnan(value) else value
            raise ReturnedError(f"returned {short(value)}, and a grade is a number from 0 (wrong) to 1 (right)", index)
    return values


Reason = Literal["correct", "wrong", "no_answer", "unparsable", "too_long", "timeout", "bad_answer"]

_PER_WORKER = 32  # pairs that justify one more worker: it takes two seconds to start, a comparison up to 0.07
_MAX_NESTING = 30  # parsing time grows steeply with the nesting, and no real answer is nested so deeply


@dataclass(frozen=True)
class Grade:
    """The judgement on one completion.

    `extracted` is the answer that the completion states. `reason` is "correct", or why it is not: "wrong"; "no_answer"
    (it states none); "unparsable" (what it states is not a number or formula); "too_long" (the answer or the completion
    is longer than any real one); "timeout" (no verdict in time); "bad_answer" (the task's own answer cannot be read).
    `score` is the number from 0 to 1 that a grader of the user's own gave; None without one.
    """

    correct: bool
    extracted: str | None
    reason: Reason
    score: float | None = None

    @property
    def value(self) -> float:
        """What the completion is worth in training."""
        return float(self.correct) if self.score is None else self.score


def grade(task: Task | str, completion: str, answer: str, question: str | None = None) -> Grade:
    """Judge one completion. Never raises, whatever a model wrote, and takes less than a second of processor time.

    With the question, an answer that only repeats an expression of the question, instead of evaluating it, is wrong. A
    task with a grader is judged by `grade_many` alone.
    """
    task = get_task(task)
    if task.answer_kind == "text":
        return _grade_text(completion, answer)
    found = extract(completion, task.answer_kind)
    if found.text is None:
        return Grade(False, None, "too_long" if found.too_long else "no_answer")
    reason = compare(found.text, answer, task.answer_kind)
    if reason == "correct" and question is not None:
        from qerl.data.formulas.copies import is_copied

        if is_copied(found.text, answer, question):
            reason = "wrong"
    return Grade(reason == "correct", found.text, reason)


def grade_many(
    task: Task | str,
    completions: Sequence[str],
    answers: Sequence[str],
    questions: Sequence[str | None] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> list[Grade]:
    """Judge many completions; several worker processes share the formulas of a large batch.

    `columns` is what a grader of the user's own gets beside: lists with a value per completion, and what is the same
    for all of them. Raises OwnFunctionError or ReturnedError (qerl/base/own_function.py) if such a grader fails.
    """
    task = get_task(task)
    if task.grader is not None:
        return _grade_by_own(task, completions, {"answer": answers, "question": questions, **(columns or {})})
    rows = list(zip(completions, answers, questions or [None] * len(answers), strict=True))
    if task.answer_kind != "math" or len(rows) < _PER_WORKER:
        return [grade(task, *row) for row in rows]
    from qerl.data.grading.math_pool import MAX_WORKERS

    with ThreadPoolExecutor(min(MAX_WORKERS, 1 + len(rows) // _PER_WORKER)) as threads:
        return list(threads.map(lambda row: grade(task, *row), rows))


def _grade_by_own(task: Task, completions: Sequence[str], given: Mapping[str, Any]) -> list[Grade]:
    if not completions:
        return []
    columns = {name: list(values) for name, values in given.items() if isinstance(values, list | tuple)}
    fixed = {"task": task, **{name: value for name, value in given.items() if name not in columns}}
    values = scores(task, {**columns, "completions": list(completions)}, fixed)
    correct = [value >= CORRECT_FROM for value in values]
    return [
        Grade(right, None, "correct" if right else "wrong", value) for right, value in zip(correct, values, strict=True)
    ]


def _grade_text(completion: str, answer: str) -> Grade:
    """What a completion marks, or else its last line, or all that it says after a thought, has to be the answer."""
    said, marked = completion.rpartition("</think>")[2].strip(), extract(completion, "text")
    stated = marked.text
    if stated is None and not marked.too_long:
        stated = said.rpartition("\n")[2].strip() or None
    if stated is None:
        return Grade(False, None, "too_long" if completion.strip() else "no_answer")
    first = re.split(r"(?<=[.。!?])\s", stated, maxsplit=1)[0]
    number = without_remark(stated) if parse_number(answer) else stated
    correct = any(_same(text, answer) for text in (stated, first, number, said))
    return Grade(correct, stated, "correct" if correct else "wrong")


def can_be_graded(answer: str, kind: Literal["number", "math"]) -> bool:
    """Whether a task's answer can be read, so that a right completion would be accepted however it is written."""
    if parse_number(answer, kind == "math") is not None:
        return True
    if kind == "number" or not tidy(answer) or len(answer) > MAX_ANSWER_CHARS or _nesting(answer) > _MAX_NESTING:
        return False
    from qerl.data.formulas.equality import is_prose, unread_values
    from qerl.data.grading import math_pool

    unread = unread_values(answer)
    return not any(is_prose(value) or math_pool.compare(value, "0") in ("bad_answer", "timeout") for value in unread)


def compare(stated: str, answer: str, kind: Literal["number", "math"]) -> Reason:
    """Compare a stated answer with the task's answer."""
    if not stated.strip():
        return "no_answer"
    if max(len(stated), len(answer)) > MAX_ANSWER_CHARS:
        return "too_long"
    if kind == "number":
        mine, theirs = parse_number(stated), parse_number(answer)
        if theirs is None:
            return "bad_answer"
        return _verdict(mine.equals(theirs)) if mine else "unparsable"
    return _compare_math(stated, answer)


def _compare_math(stated: str, answer: str) -> Reason:
    if not tidy(answer):
        return "bad_answer"
    based = _based(stated), _based(answer)
    if None not in based:
        return _verdict(based[0] == based[1])
    if based[0] is not None and not _has_digits_of_base(*based[0]):  # 18_7 is not even a number
        return "wrong"
    if _nesting(stated) > _MAX_NESTING:
        return "unparsable"
    from qerl.data.formulas.equality import compare_math
    from qerl.data.grading import math_pool

    verdict = compare_math(stated, answer, math_pool.compare)
    return {"equal": "correct", "different": "wrong"}.get(verdict, verdict)


def _verdict(correct: bool) -> Reason:
    return "correct" if correct else "wrong"


def _nesting(text: str) -> int:
    """The largest number of brackets that are open at once."""
    depths = itertools.accumulate((char in "({[") - (char in ")}]") for char in text)
    return max(depths, default=0)


def _has_digits_of_base(digits: str, base: str) -> bool:
    """False if a digit is too large for a base of one digit; "a_1" has another kind of index, and 9_005 thousands."""
    return not digits.isdigit() or not re.fullmatch("[1-9]", base) or max(digits) < base


def _based(text: str) -> tuple[str, str] | None:
    """The digits and the base of a number such as "1011_2"; None for anything else."""
    match = re.fullmatch(
        r"(?:\\text\{)?([0-9A-Fa-f]+)\}?_\{?(?:\\text\{)?(\d+|[a-z]+)\}*", strip_math(text).replace(" ", "")
    )
    return (match[1].upper(), match[2]) if match else None
