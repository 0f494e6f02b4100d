"""The rewards of a recipe: find them by name or path, call them with the columns they ask for, check what they return.

A reward is a function that takes columns and returns one finite number per completion, for example

    def short(completions, **columns):  # named as rewards.py:short in the recipe
        return [float(len(text) < 500) for text in completions]

It is called with the columns that training/rewards/functions.py lists, as keyword arguments; a function that does not
end in `**columns` gets only the columns it names. It runs in a process of its own (qerl/own/function.py), within
`timeout_s`, and may be async. A reward that raises, is late, ends its process, or returns None, NaN or the wrong number
of values, stops the run, and the completion it failed on is saved as failed_reward.json in the run directory. If the
name is a URL, the reward is a reward server (training/rewards/server.py).
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from qerl.config.rules_rewards import OWN, is_url
from qerl.data.examples import check_answers
from qerl.errors import ConfigError, RewardError
from qerl.own.columns import COLUMNS, EPISODE_COLUMNS, check_columns, first_to_fail
from qerl.own.function import TIMEOUT_S, LateError, Named, OwnFunction, OwnFunctionError, own_function
from qerl.own.given import PYTHON, GivenFunction, given_function
from qerl.own.returned import ReturnedError, numbers
from qerl.tasks import Example
from qerl.tasks.own_grader import check_grader
from training.rewards import functions as reward_functions
from training.rewards.judge import Judge
from training.rewards.server import RewardServer
from training.run_dir.log import RUN_FOLDERS, RUN_METRICS, is_own

if TYPE_CHECKING:
    from qerl.config.schema import RewardConfig
    from qerl.tasks import Task

Reward = Callable[..., Sequence[float]]
LogMetric = Callable[[str, float], None]

REWARDS: dict[str, Reward] = {
    "accuracy": reward_functions.accuracy,
    "format": reward_functions.format,
    "soft_overlong": reward_functions.soft_overlong,
    "length": reward_functions.length,
    "judge": Judge(),
    "environment": reward_functions.environment,
}

GRADED = ("accuracy", "length")  # rewards that use the task's grading
FAILED = "failed_reward.json"
TRIED = 2  # rows that a reward server has to grade before training starts


@dataclass(frozen=True)
class Rewards:
    """The rewards of a run. Each function has the name of its metric."""

    functions: list[Reward]
    weights: list[float]

    @property
    def names(self) -> list[str]:
        return [function.__name__ for function in self.functions]


def fixed_columns(task: Task, max_new_tokens: int) -> dict[str, Any]:
    """The arguments of a reward that are the same for every completion of a run."""
    return {"task": task, "max_new_tokens": max_new_tokens}


def build_rewards(
    wanted: Sequence[RewardConfig],
    fixed: Mapping[str, Any],
    examples: Sequence[Example],
    run_dir: Path,
    episodes: bool = False,
) -> Rewards:
    """The rewards that a recipe wants; `fixed` comes from `fixed_columns`. Those of `episodes` have further columns.

    Raises ConfigError for an unknown reward, or for arguments that it does not take.
    """
    functions: list[Reward] = []
    check_grader(fixed["task"], examples)
    if any(reward.name in GRADED for reward in wanted):
        check_answers(fixed["task"], examples)
    for reward, function in zip(wanted, check_rewards(wanted, fixed), strict=True):
        others = (*reward.args, *(EPISODE_COLUMNS if episodes else ()))
        check_columns(f"reward {reward.name}", inspect.signature(function).parameters, others, examples)
        guarded = _GuardedReward(_metric_name(reward.name, functions), reward, function, fixed, examples, run_dir)
        if is_url(reward.name) or isinstance(function, Judge):
            _try_server(guarded, examples[:TRIED])
        functions.append(guarded)
    return Rewards(functions, [float(reward.weight) for reward in wanted])


def check_rewards(wanted: Sequence[RewardConfig], fixed: Mapping[str, Any]) -> list[Reward]:
    """Find a recipe's rewards and check their arguments; needs no heavy import. Raises ConfigError."""
    functions = []
    for reward in wanted:
        function = find_reward(reward.name, reward.timeout_s)
        _check_arguments(reward, function)
        if reward.name in REWARDS:
            _try_arguments(reward, function, fixed)
        elif is_url(reward.name):
            function.check_args(reward.args)
        functions.append(function)
    return functions


def find_reward(name: str, timeout_s: float | None = None) -> Reward:
    """The reward that a name, URL, `file.py:function`, `package.module:function` or `package.module.function` means."""
    if name in REWARDS:
        return REWARDS[name]
    if name == "code":
        return reward_functions.code()
    if is_url(name):
        return RewardServer(name)
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not attribute:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no reward {name!r}{hint} (rewards: {', '.join(REWARDS)}; {OWN})")
    if place == PYTHON:
        return given_function("reward", attribute)
    others = f"one of {', '.join(REWARDS)}"
    return own_function(place, attribute, Named("reward", name, others), timeout_s)


def _check_arguments(reward: RewardConfig, function: Reward) -> None:
    """Raise ConfigError if the recipe gives an argument that the function does not take."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = reward.name not in REWARDS and not is_url(reward.name)
    takes_all = own and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    options = [name for name in named if name not in (*COLUMNS, *EPISODE_COLUMNS, "log_metric")]
    for key in reward.args:
        if key in COLUMNS or (key not in options and not takes_all):
            near = difflib.get_close_matches(key, options, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"reward {reward.name} takes no argument {key!r}{hint} (its arguments: {', '.join(options) or 'none'})"
            )


def _try_arguments(reward: RewardConfig, function: Reward, fixed: Mapping[str, Any]) -> None:
    """Call one of our own rewards on an empty batch, so that wrong arguments show before the first rollout."""
    try:
        function(**dict.fromkeys(COLUMNS, ()) | fixed | dict(reward.args))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {reward.name} cannot be called with args {dict(reward.args)}: {error}") from error


def _try_server(reward: _GuardedReward, examples: Sequence[Example]) -> None:
    """Ask a server about the first rows, with their answers as completions, to see that it answers as it has to."""
    texts = [example.answer for example in examples]
    rows = list(range(len(examples)))
    reward(texts, rows, prompts=[example.question for example in examples], completion_ids=[[0] for _ in texts])


def _metric_name(name: str, earlier: Sequence[Any]) -> str:
    """The name of the function (for a URL the end of its path, else its host); the full name if that is taken."""
    if is_url(name):
        url = urlsplit(name)
        short, name = (
            url.path.strip("/").rpartition("/")[2] or url.hostname,
            f"{url.netloc}{url.path}".replace("/", "_"),
        )
    else:
        short = name if name in REWARDS else name.replace(":", ".").rsplit(".", 1)[-1]
    return name if any(reward.__name__ == short for reward in earlier) else short


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


def _log_nothing(_name: str, _value: float) -> None:
    """The `log_metric` that rewards get outside of a run."""


class _GuardedReward:
    """A reward as grading calls it: it adds the columns of the examples and checks what the function returns."""

    def __init__(
        self,
        name: str,
        reward: RewardConfig,
        function: Reward,
        fixed: Mapping[str, Any],
        examples: Sequence[Example],
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
            **{name: given[name] for name in EPISODE_COLUMNS if name in given},
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
        raise RewardError(
            f"reward {self.__name__} {what}; the completion it failed on is in {saved}. A reward has to return one "
            f"finite number for each completion{late}, 0 for one that it cannot judge"
        ) from cause
