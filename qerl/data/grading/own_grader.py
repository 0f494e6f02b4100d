"""A task's grading by a function of the user's own: the same file in training and in evaluation.

    def grade(completion, answer, **row):
        return completion.strip() == answer

The function returns True or False, or a number from 0 (wrong) to 1 (right), from a half of which on a completion counts
as correct. It may take `completions` and other columns as lists instead, and return a list. It is called as own
rewards are: in a process of its own, within a time limit (qerl/base/own/function.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from qerl.api.given import PYTHON, GivenFunction, given_function
from qerl.base.errors import ConfigError
from qerl.base.own.columns import check_columns
from qerl.base.own.function import Named, OwnFunction, own_function
from qerl.base.own.returned import ReturnedError, short
from qerl.data.tasks import Example, Task

FUNCTION = "grade"  # where a grader names a file alone
CORRECT_FROM = 0.5
OTHER = "path/to/file.py, whose function `grade` is then taken"


def find_grader(task: Task) -> OwnFunction | GivenFunction:
    """The function that grades the task. Raises ConfigError."""
    place, attribute = grader_place(task.grader)
    if place == PYTHON:
        return given_function("grader", attribute)
    return own_function(place, attribute, Named("grader", task.grader, OTHER), task.grader_timeout_s)


def grader_place(name: str) -> tuple[str, str]:
    """The file or module, and the function in it. Raises ConfigError for a name that cannot be one."""
    if name.endswith(".py"):
        return name, FUNCTION
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not attribute.isidentifier():
        raise ConfigError(f"grader {name!r} names no function: write path/to/file.py, or path/to/file.py:function")
    return place, attribute


def check_grader(task: Task, examples: Sequence[Example] = ()) -> None:
    """Raise ConfigError if the task's grader cannot be loaded, or asks for a column that these examples lack."""
    if task.grader is None:
        return
    function = find_grader(task)
    parameters = inspect.signature(function).parameters
    if examples:
        check_columns(f"grader {task.grader}", parameters, (), examples)


def scores(task: Task, columns: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]) -> list[float]:
    """A number from 0 to 1 for each completion. Raises OwnFunctionError and ReturnedError.

    `columns` has a value for each completion, `fixed` arguments that are the same for all of them.
    """
    function = find_grader(task)
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        columns, fixed = ({key: given[key] for key in given if key in names} for given in (columns, fixed))
    values = function(len(next(iter(columns.values()), ())), task.grader_timeout_s, fixed, **columns)
    for index, value in enumerate(values):
        if not 0 <= value <= 1:
            raise ReturnedError(f"returned {short(value)}, and a grade is a number from 0 (wrong) to 1 (right)", index)
    return values
