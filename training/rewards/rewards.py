"""The rewards of a recipe: those that ship with qerl, how one is found by name or path, and the calls that check it.

A reward takes columns by name and returns one finite number per completion:

    def short(completions, **columns):  # named as rewards.py:short in the recipe
        return [float(len(text) < 500) for text in completions]

The columns are completions, completion_ids, prompts (rendered text), question, answer, row (the same number for all
completions of one prompt), task, max_new_tokens, step, and the data set's other columns by their names. A function of
the user's runs in a process of its own (qerl/base/own_function.py) and gets what TRL 1.16 gives one (`GuardedReward`).
A reward whose name is a URL is a reward server (training/rewards/server.py).
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import urlsplit

from qerl.base.errors import ConfigError, RewardError
from qerl.base.isolate import ReturnedError, numbers
from qerl.base.own_function import (
    COLUMNS,
    ENVIRONMENTS,
    EPISODE_COLUMNS,
    GIVEN,
    TIMEOUT_S,
    LateError,
    Named,
    OwnFunction,
    OwnFunctionError,
    check_columns,
    first_to_fail,
    own_function,
)
from qerl.base.program import PYTHON, GivenFunction, given_function
from qerl.config.data import GRADED, OWN, REWARD_NAMES, is_url
from qerl.data.examples import check_answers
from qerl.data.grading.grade import check_grader, grade_many
from qerl.data.rows import sources_of
from qerl.data.tasks import Example, Task, task_of
from qerl.report.metrics import RUN_FOLDERS, RUN_METRICS, is_own

if TYPE_CHECKING:
    from qerl.config.schema import RewardConfig, RunConfig
    from training.loss.groups import Prompt


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


Reward = Callable[..., Sequence[float]]
LogMetric = Callable[[str, float], None]
LogExtra = Callable[[str, Sequence[Any]], None]

FAILED = "failed_reward.json"


def _own_metrics(log: LogMetric, reward: str) -> LogMetric:
    """`log` with its arguments checked at once, so that an error arises in the function that made the mistake.

    Raises TypeError or ValueError for a value that is not a number, and RewardError for a name that the run logs
    itself: the two metrics would be mixed.
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


def _log_nothing(_name: str, _value: Any) -> None:
    """The `log_metric` and `log_extra` that rewards get outside of a run."""


@dataclass(frozen=True)
class Rows:
    """The rows of one source, of which `first` is the number of the first one in the run."""

    examples: Sequence[Example]
    first: int = 0

    def __getitem__(self, row: int) -> Example:
        return self.examples[row - self.first]


class GuardedReward:
    """A reward as grading calls it: it adds the columns of the examples and checks what the function returns.

    A function that does not end in `**columns` gets only the columns that it names; it may be async, and has
    `timeout_s`. One that raises, is late, ends its process, or returns NaN or the wrong number of values, stops the
    run, and the completion it failed on is saved as failed_reward.json in the run directory.

    As in TRL 1.16 (GRPOTrainer._calculate_rewards), a user's function gets each completion of a row of messages as a
    list of messages, and its prompt too; `trainer_state`, `log_metric` and `log_extra` are there; None for a completion
    leaves the reward out of its sum.
    """

    limit = "rewards.N.timeout_s"  # what sets the limit of time
    then = ""  # how to go on once it is corrected, where that is not said elsewhere

    def __init__(
        self, name: str, reward: RewardConfig, function: Reward, fixed: Mapping[str, Any], examples: Rows, run_dir: Path
    ) -> None:
        self.__name__ = name
        self._task_grades = reward.name in GRADED and fixed["task"].grader is not None
        # For another process, so that others can be asked.
        self.waits = self._task_grades or isinstance(function, OwnFunction) or _is_asked(reward.name)
        self._function = function
        self._timeout_s = TIMEOUT_S if reward.timeout_s is None else reward.timeout_s
        self._examples = examples
        self._run_dir = run_dir
        self._fixed = {**fixed, **reward.args}
        parameters = inspect.signature(function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._wanted = None if takes_all else set(parameters)

    def __call__(
        self,
        completions: list[str],
        row: list[int],
        step: int = 0,
        log_metric: LogMetric = _log_nothing,
        log_extra: LogExtra = _log_nothing,
        **given: Any,
    ) -> list[float]:
        """One reward per completion, NaN where it does not apply; `row` indexes into the run's examples.

        `log_extra` gets a value per completion. Raises RewardError.
        """
        columns, extra = self._columns(completions, row, given), defaultdict(list)
        fixed = {
            **self._fixed,
            "step": step,
            "trainer_state": SimpleNamespace(global_step=given.get("steps_done", 0), **self._fixed["trainer_state"]),
            "log_metric": _own_metrics(log_metric, self.__name__),
            "log_extra": lambda column, values: extra[column].extend(values),
        }
        try:
            rewards = self._run(columns, fixed, self._timeout_s)
        except ReturnedError as error:
            self._fail(error.what, columns, error.index, fixed)
        except OwnFunctionError as error:
            index = error.index if error.index is not None else self._first_to_fail(columns, fixed)
            self._fail(f"{error}{self._hint(error, columns)}", columns, index, fixed, error)
        for column, values in extra.items():
            if len(values) != len(completions):
                what = f"gave log_extra({column!r}, ...) {len(values)} values for {len(completions)} completions"
                self._fail(what, columns, None, fixed)
            log_extra(column, values)
        return rewards

    def _columns(self, completions: list[str], row: list[int], given: Mapping[str, Any]) -> dict[str, list[Any]]:
        examples = [self._examples[index] for index in row]
        names = dict.fromkeys(key for example in examples for key in example.extra)
        asked, written = given["prompts"], completions
        if isinstance(self._function, OwnFunction | GivenFunction):
            played = given.get("turns") or [()] * len(completions)
            alone = ([{"role": "assistant", "content": text}] for text in completions)
            turns = [exchange or one for exchange, one in zip(played, alone, strict=True)]
            chats = [example.conversational for example in examples]
            written = [said if chat else text for chat, said, text in zip(chats, turns, completions, strict=True)]
            asked = [ex.messages if ex.conversational else text for ex, text in zip(examples, asked, strict=True)]
        return {
            **{key: [example.extra.get(key) for example in examples] for key in names},
            "completions": written,
            "completion_ids": given["completion_ids"],
            "prompts": asked,
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

    def _hint(self, error: OwnFunctionError, columns: Mapping[str, list[Any]]) -> str:
        """What may explain an error of a function that reads the messages of a completion as text, or the reverse."""
        if not str(error).startswith(("raised TypeError", "raised AttributeError", "raised KeyError")):
            return ""
        if not isinstance(columns["completions"][0], str):
            return (
                '. The rows have messages, so a completion is a list of messages, and its text completion[0]["content"]'
            )
        return ". The rows have no messages, so a completion is a text" if "string ind" in str(error) else ""

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
        """Raise RewardError; `index` is the completion that it failed on, None for the whole batch."""
        who, returns = f"reward {self.__name__}", "one finite number for each completion"
        if self._task_grades:
            who = f"grader {Path(self._fixed['task'].grader).name}"
            returns = "True, False or a number from 0 to 1 for a completion"
        late = f", within {self.limit} ({self._timeout_s:g})" if isinstance(cause, LateError) else ""
        raise RewardError(
            f"{who} {what}{self._shown(what, columns, index, fixed)}. A {who.partition(' ')[0]} has to return "
            f"{returns}{late}, 0 for one that it cannot judge{self.then}"
        ) from cause

    def _shown(self, what: str, columns: Mapping[str, list[Any]], index: int | None, fixed: Mapping[str, Any]) -> str:
        """Where the completion can be seen: it is saved, and the whole batch if `index` is None."""
        picked = range(len(columns["completions"])) if index is None else [index]
        rows = [{key: values[i] for key, values in columns.items()} for i in picked]
        report = {"reward": self.__name__, "error": what, "step": fixed["step"], "completions": rows}
        path, lost = self._run_dir / FAILED, ""
        text = json.dumps(report, ensure_ascii=False, indent=2, default=repr) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8", "backslashreplace")
        except OSError as error:
            lost = f", which could not be written ({error.strerror})"
        return f"; the completion it failed on is in {path}{lost}"


REWARDS: dict[str, Reward] = {
    "accuracy": accuracy,
    "format": format,
    "soft_overlong": soft_overlong,
    "length": length,
    "environment": environment,
}
JUDGE = "judge"  # the one of REWARD_NAMES that is asked over HTTP

TRIED = 2  # rows that a reward server has to grade before training starts


@dataclass(frozen=True)
class Rewards:
    """The rewards of a run. Each function has the name of its metric; one of another source may have the same."""

    functions: list[Reward]
    weights: list[float]
    sources: tuple[int, ...] = ()  # of each function, whose rewards it gives; empty: there is one source
    source_names: tuple[str, ...] = ("",)

    @property
    def names(self) -> list[str]:
        """The metrics, each once."""
        return list(dict.fromkeys(function.__name__ for function in self.functions))

    def source_of(self, index: int) -> int:
        """Whose rewards a function gives."""
        return self.sources[index] if self.sources else 0

    def of_source(self, source: int) -> list[int]:
        """The indices of a source's functions."""
        return [index for index in range(len(self.functions)) if not self.sources or self.sources[index] == source]


def fixed_columns(task: Task, max_new_tokens: int, max_steps: int = 0) -> dict[str, Any]:
    """The arguments of a reward that are the same for every completion of a run."""
    return {"task": task, "max_new_tokens": max_new_tokens, "trainer_state": {"max_steps": max_steps}}


@dataclass(frozen=True)
class RewardsOf:
    """What the rewards of one source are made of; `fixed` comes from `fixed_columns`."""

    name: str
    wanted: Sequence[RewardConfig]
    fixed: Mapping[str, Any]
    examples: Sequence[Example]


def build_all_rewards(sources: Sequence[RewardsOf], run_dir: Path, episodes: Sequence[str] = ()) -> Rewards:
    """The rewards of all sources, whose examples are the run's rows, one source after another.

    `episodes` are the further columns of a run with an environment. Raises ConfigError for an unknown reward, or for
    arguments that it does not take.
    """
    names = _metric_names([reward.name for source in sources for reward in source.wanted])
    functions, weights, places, first = [], [], [], 0
    for place, source in enumerate(sources):
        of_grader = [name for name in episodes if name in EPISODE_COLUMNS]
        check_grader(source.fixed["task"], source.examples, of_grader)
        if any(reward.name in GRADED for reward in source.wanted):
            check_answers(source.fixed["task"], source.examples)
        for reward, function in zip(source.wanted, check_rewards(source.wanted, source.fixed), strict=True):
            of_function = episode_columns(function)
            further = [name for name in episodes if name in of_function]
            parameters = inspect.signature(function).parameters
            extra = {key for example in source.examples for key in example.extra}
            check_columns(f"reward {reward.name}", parameters, reward.args, extra, further)
            rows = Rows(source.examples, first)
            guarded = GuardedReward(names[reward.name], reward, function, source.fixed, rows, run_dir)
            if _is_asked(reward.name):
                _try_server(guarded, rows)
            functions.append(guarded)
            weights.append(float(reward.weight))
            places.append(place)
        first += len(source.examples)
    return Rewards(functions, weights, tuple(places), tuple(source.name for source in sources))


def rewards_of_run(
    config: RunConfig, prompts: Sequence[Prompt], run_dir: Path, episodes: Sequence[str] = ()
) -> Rewards:
    """The rewards of a recipe over a run's prompts."""
    given = []
    for index, source in enumerate(sources_of(config.data, config.rewards)):
        fixed = fixed_columns(task_of(source.data), config.rollout.max_new_tokens, config.run.steps)
        examples = [prompt.example for prompt in prompts if prompt.source == index]
        given.append(RewardsOf(source.name, source.rewards, fixed, examples))
    return build_all_rewards(given, run_dir, episodes)


def _is_asked(name: str) -> bool:
    """Whether a reward comes over HTTP (training/rewards/server.py, which no other run loads)."""
    return name == JUDGE or is_url(name)


def check_rewards(wanted: Sequence[RewardConfig], fixed: Mapping[str, Any]) -> list[Reward]:
    """Find a recipe's rewards and check their arguments; needs no heavy import. Raises ConfigError."""
    functions = []
    for reward in wanted:
        function = find_reward(reward.name, reward.timeout_s)
        _check_arguments(reward, function)
        if reward.name in REWARD_NAMES:
            _try_arguments(reward, function, fixed)
        elif is_url(reward.name):
            function.check_args(reward.args)
        functions.append(function)
    return functions


def find_reward(name: str, timeout_s: float | None = None) -> Reward:
    """The reward that a name, URL, `file.py:function`, `package.module:function` or `package.module.function` means."""
    if name in REWARDS:
        return REWARDS[name]
    if _is_asked(name):
        from training.rewards.server import Judge, RewardServer

        return Judge() if name == JUDGE else RewardServer(name)
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not attribute:
        raise ConfigError(f"there is no reward {name!r}: write one of {', '.join(REWARD_NAMES)}, or {OWN}")
    if place == PYTHON:
        return given_function("reward", attribute)
    others = f"one of {', '.join(REWARD_NAMES)}"
    return own_function(place, attribute, Named("reward", name, others), timeout_s)


def _check_arguments(reward: RewardConfig, function: Reward) -> None:
    """Raise ConfigError if the recipe gives an argument that the function does not take."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = reward.name not in REWARD_NAMES and not is_url(reward.name)
    takes_all = own and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    options = [name for name in named if name not in (*COLUMNS, *episode_columns(function), *GIVEN)]
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


def _try_server(reward: GuardedReward, rows: Rows) -> None:
    """Ask a server about the first rows, with their answers as completions, to see that it answers as it has to."""
    examples = rows.examples[:TRIED]
    texts = [example.answer for example in examples]
    numbers = list(range(rows.first, rows.first + len(examples)))
    reward(texts, numbers, prompts=[example.question for example in examples], completion_ids=[[0] for _ in texts])


def _metric_names(rewards: Sequence[str]) -> dict[str, str]:
    """The metric of each reward. Ours have their own names; of others see `_metric_name`."""
    found = {name: name for name in rewards if name in REWARD_NAMES}
    for name in rewards:
        if name not in found:
            found[name] = _metric_name(name, found.values())
    return found


def _metric_name(name: str, taken: Collection[str]) -> str:
    """The function's name, or of a URL the end of its path, else its host; the whole name if that is `taken`."""
    if is_url(name):
        url = urlsplit(name)
        short = url.path.strip("/").rpartition("/")[2] or url.hostname
        whole = f"{url.netloc}{url.path}".replace("/", "_")
    else:
        short, whole = name.replace(":", ".").rpartition(".")[2], name
    return whole if short in taken else short
