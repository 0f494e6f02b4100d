"""A reward as grading calls it: with the columns that it asks for, and with what it returns checked."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qerl.api.arguments import GivenFunction
from qerl.base.errors import RewardError
from qerl.base.own.function import (
    ENVIRONMENTS,
    EPISODE_COLUMNS,
    TIMEOUT_S,
    LateError,
    OwnFunction,
    OwnFunctionError,
    first_to_fail,
)
from qerl.base.own.process import ReturnedError, numbers
from qerl.data.tasks import Example
from training.rewards.judge import Judge
from training.rewards.server import RewardServer
from training.run_dir.log import RUN_FOLDERS, RUN_METRICS, is_own

if TYPE_CHECKING:
    from qerl.config.schema import RewardConfig

Reward = Callable[..., Sequence[float]]
LogMetric = Callable[[str, float], None]

GRADED = ("accuracy", "length")  # rewards that use the task's grading
FAILED = "failed_reward.json"


def _own_metrics(log: LogMetric, reward: str) -> LogMetric:
    """`log` with its arguments checked at once, so that an error arises in the function that made the mistake.

    Raises TypeError or ValueError for a value that is no number, and RewardError for a name that the run logs itself:
    the two metrics would be mixed.
    """

    def checked(name: str, value: float) -> None:
        if is_own(str(name)):
            raise RewardError(
                f"reward {reward} calls log_metric({name!r}, ...), and the run logs a metric of that name itself: "
                f"write another name, such as {f'own/{name}'!r}. The run's own are {', '.join(RUN_METRICS)}, and all "
                f"under {', '.join(RUN_FOLDERS)}"
            )
        log(str(name), float(value))

    return checked


def episode_columns(function: Reward) -> tuple[str, ...]:
    """The further columns of episodes; the objects themselves are for functions of this process alone."""
    return (*EPISODE_COLUMNS, *([ENVIRONMENTS] if isinstance(function, GivenFunction) else []))


def _log_nothing(_name: str, _value: float) -> None:
    """The `log_metric` that rewards get outside of a run."""


@dataclass(frozen=True)
class Rows:
    """The rows of one source, of which `first` is the number of the first one in the run."""

    examples: Sequence[Example]
    first: int = 0

    def __getitem__(self, row: int) -> Example:
        return self.examples[row - self.first]


class GuardedReward:
    """A reward as grading calls it: it adds the columns of the examples and checks what the function returns."""

    def __init__(
        self,
        name: str,
        reward: RewardConfig,
        function: Reward,
        fixed: Mapping[str, Any],
        examples: Rows,
        run_dir: Path,
    ) -> None:
        self.__name__ = name
        self._task_grades = reward.name in GRADED and fixed["task"].grader is not None
        # For another process, so that others can be asked.
        self.waits = self._task_grades or isinstance(function, OwnFunction | RewardServer | Judge)
        self._function = function
        limit_s = fixed["task"].grader_timeout_s if self._task_grades else reward.timeout_s
        self._timeout_s = TIMEOUT_S if limit_s is None else limit_s
        self._examples = examples
        self._run_dir = run_dir
        self._fixed = {**fixed, **reward.args}
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._wanted = None if takes_all else set(parameters)

    def __call__(
        self, completions: list[str], row: list[int], step: int = 0, log_metric: LogMetric = _log_nothing, **given: Any
    ) -> list[float]:
        """One reward per completion; `row` indexes into the run's examples. Raises RewardError."""
        columns = self._columns(completions, row, given)
        fixed = {**self._fixed, "step": step, "log_metric": _own_metrics(log_metric, self.__name__)}
        try:
            return self._run(columns, fixed, self._timeout_s)
        except ReturnedError as error:
            self._fail(error.what, columns, error.index, fixed)
        except OwnFunctionError as error:
            index = error.index if error.index is not None else self._first_to_fail(columns, fixed)
            self._fail(str(error), columns, index, fixed, error)

    def _columns(self, completions: list[str], row: list[int], given: Mapping[str, Any]) -> dict[str, list[Any]]:
        examples = [self._examples[index] for index in row]
        names = dict.fromkeys(key for example in examples for key in example.extra)
        return {
            **{key: [example.extra.get(key) for example in examples] for key in names},
            "completions": completions,
            "completion_ids": given["completion_ids"],
            "prompts": given["prompts"],
            "question": [example.question for example in examples],
            "answer": [example.answer for example in examples],
            "row": row,
            **{name: given[name] for name in episode_columns(self._function) if name in given},
        }

    def _run(self, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any], timeout_s: float) -> list[float]:
        """Call the function. It gets copies of the lists, since other rewards read the same columns."""
        completions = columns["completions"]
        wanted = {**columns, **fixed}.keys() if self._wanted is None else self._wanted
        fixed = {key: value for key, value in fixed.items() if key in wanted}
        columns = {key: values for key, values in columns.items() if key in wanted and key not in fixed}
        if isinstance(self._function, OwnFunction | GivenFunction):
            return self._function(len(completions), timeout_s, fixed, **columns)
        if self._task_grades:
            fixed["task"] = replace(fixed["task"], grader_timeout_s=timeout_s)
        own = {key: [list(value) if isinstance(value, list) else value for value in columns[key]] for key in columns}
        return numbers(self._function(**own, **fixed), len(completions))

    def _first_to_fail(self, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any]) -> int | None:
        def call(index: int, timeout_s: float) -> None:
            self._run({key: [values[index]] for key, values in columns.items()}, fixed, timeout_s)

        return first_to_fail(call, len(columns["completions"]), self._timeout_s)

    def _fail(
        self,
        what: str,
        columns: Mapping[str, list[Any]],
        index: int | None,
        fixed: Mapping[str, Any],
        cause: Exception | None = None,
    ) -> NoReturn:
        """Save the completion (the whole batch if `index` is None) and raise RewardError."""
        picked = range(len(columns["completions"])) if index is None else [index]
        rows = [{key: values[i] for key, values in columns.items()} for i in picked]
        report = {"reward": self.__name__, "error": what, "step": fixed["step"], "completions": rows}
        path = self._run_dir / FAILED
        text = json.dumps(report, ensure_ascii=False, indent=2, default=repr) + "\n"
        saved = f"{path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8", "backslashreplace")
        except OSError as error:
            saved += f", which could not be written ({error.strerror})"
        limit = "data.grader_timeout_s" if self._task_grades else "rewards.N.timeout_s"
        late = f", within {limit} ({self._timeout_s:g})" if isinstance(cause, LateError) else ""
        who, returns = f"reward {self.__name__}", "one finite number for each completion"
        if self._task_grades:
            who, returns = (
                f"grader {Path(self._fixed['task'].grader).name}",
                "True, False or a number from 0 to 1 for a completion",
            )
        raise RewardError(
            f"{who} {what}; the completion it failed on is in {saved}. A {who.partition(' ')[0]} has to return "
            f"{returns}{late}, 0 for one that it cannot judge"
        ) from cause
