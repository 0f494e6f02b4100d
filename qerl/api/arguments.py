"""Arguments of the Python interface as recipes and commands name them, and the process that a call leaves as it was.

A command may change its process as it likes, but a program goes on. So when a call of qerl ends, however it ends,
`as_before` restores environment, loggers, random generators and torch's settings, and no engine holds a card's memory
any more. One thing stays: once CUDA has started, the process keeps its card, and CUDA_VISIBLE_DEVICES says which.
"""

import functools
import inspect
import json
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

from qerl.base.devices import ORDER, VISIBLE
from qerl.base.errors import ConfigError, DataError
from qerl.base.isolate import short
from qerl.base.program import PYTHON, rows_file
from qerl.cli.terminal import NOISY_LOGGERS, quiet_libraries_
from qerl.config.data import SourceConfig
from qerl.config.keys import nearest
from qerl.config.names import ENVIRONMENTS
from qerl.engine.open import engines_closed_on_error
from qerl.episodes.build import KNOWN, TOOLS, register

P, T = ParamSpec("P"), TypeVar("T")


_guard = threading.Lock()
_at_work: tuple[int, str] | None = None  # process and name of the call that has this process


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse the call, in one line, while another of these works in this process, whose state all of them change."""

    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> T:
        global _at_work
        name, own = f"qerl.{function.__name__}", os.getpid()
        with _guard:
            if _at_work is not None and _at_work[0] == own:
                raise ConfigError(
                    f"{name} was called while {_at_work[1]} is at work in this process: call one after the other, or "
                    "start a process for each"
                )
            _at_work = own, name
        try:
            return function(*given, **named)
        finally:
            with _guard:
                _at_work = None

    return called


def spelled_out(arguments: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Show `help` the fields of a TypedDict in place of the `**arguments: Unpack[...]` that stands last."""

    def spelled(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        fields = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind.__forward_arg__)
            for name, kind in arguments.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*list(signature.parameters.values())[:-1], *fields])
        return function

    return spelled


MOST_ROWS, MOST_BYTES = 1_000_000, 2**30  # of rows without a length, such as a generator's


@contextmanager
def as_before() -> Iterator[None]:
    """Within it libraries are quiet; afterwards the program's state is what it was. Imports torch."""
    environment = dict(os.environ)
    loggers = [logging.getLogger(), *map(logging.getLogger, NOISY_LOGGERS)]
    levels = [logger.level for logger in loggers]
    quiet_libraries_()
    try:
        import torch  # before the number of threads is chosen, which would else hold for the whole program

        with _same_state(torch), engines_closed_on_error():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        _restore_environment(environment)


def _restore_environment(before: dict[str, str]) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        before = before | {name: os.environ[name] for name in (VISIBLE, ORDER) if name in os.environ}
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def _same_state(torch: Any) -> Iterator[None]:
    """Put the states of the random generators and torch's settings back."""
    import numpy

    strict = functools.partial(
        torch.use_deterministic_algorithms, warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
    )
    states = [
        (random.setstate, random.getstate()),
        (numpy.random.set_state, numpy.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
        (strict, torch.are_deterministic_algorithms_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
    ]
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    try:
        yield
    finally:
        for restore, state in states:
            restore(state)


Function = Callable[..., Any]
GivenRows = Iterable[Mapping[str, Any]]


class Functions(dict[str, Function]):
    """The functions of a call, by their names, which a recipe writes after `python:`."""

    def name_of(self, function: Function) -> str:
        """The name for a recipe. Raises ConfigError for a second function of the same name."""
        own = getattr(function, "func", function)  # of a functools.partial
        name = getattr(own, "__name__", type(own).__name__)
        name = name if name.isidentifier() else "reward"  # a lambda
        if self.setdefault(name, function) is not function:
            raise ConfigError(f"two functions are called {name!r}, and metrics go by names: rename one of them")
        return f"{PYTHON}:{name}"


def rewards_of(reward: object, functions: Functions) -> list[dict[str, Any]]:
    """`rewards` for a recipe: of a function, a name, a mapping as a recipe has it, or a list of these."""
    given = reward if isinstance(reward, list | tuple) else [reward]
    return [_reward(each, functions) for each in given]


def _reward(given: object, functions: Functions) -> dict[str, Any]:
    asked = given if isinstance(given, Mapping) else {"name": given}
    name = asked.get("name")
    if callable(name) or isinstance(name, str):
        return {**asked, "name": functions.name_of(name) if callable(name) else name}
    raise ConfigError(
        f"reward={given!r} is no reward: give a function, a name such as 'accuracy' or 'rewards.py:short', a mapping "
        "with name, weight and args, or a list of these"
    )


def grader_of(grader: str | Function | None, functions: Functions) -> str | None:
    """A grader's name for a recipe or an evaluation. Raises ConfigError for what is neither a function nor a name."""
    if not (grader is None or callable(grader) or isinstance(grader, str | os.PathLike)):
        raise ConfigError(f"grader={short(grader)} is not a grader: give a function, or a name such as 'grader.py'")
    return functions.name_of(grader) if callable(grader) else grader and os.fspath(grader)


def is_path(data: object) -> bool:
    """Whether `data` names rows (a file, a folder, a hub id), and is not the rows themselves."""
    return isinstance(data, str | os.PathLike)


def plain_rows(data: GivenRows) -> list[dict[str, Any]]:
    """The rows as a jsonl file gives them back: a list of mappings, a data set of `datasets`, a pandas table.

    Raises DataError for what is not a table of JSON values.
    """
    if hasattr(data, "notna") and hasattr(data, "columns"):  # a pandas table, which would give its columns' names
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    rows, size = [], 0
    try:
        for number, row in enumerate(data, start=1):
            if not hasattr(data, "__len__") and (number > MOST_ROWS or size > MOST_BYTES):
                raise DataError(
                    f"data gives more than {number - 1} rows and has no length: is there an end? Give a list, such as "
                    "list(itertools.islice(data, 10_000)), or write the rows to a file and give its path"
                )
            if not isinstance(row, Mapping):
                raise DataError(f"row {number} of data is {short(row)}: give mappings, such as {{'prompt': ...}}")
            text = json.dumps(dict(row), default=_listed, allow_nan=False)
            size += len(text)
            rows.append(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        where = (
            f"row {len(rows) + 1} of data cannot be kept as JSON" if rows or isinstance(data, Iterable) else "data is"
        )
        what = f" ({error})" if where != "data is" else f" {short(data)}"
        raise DataError(
            f"{where}{what}: give a list of mappings with text, numbers and lists, or the path of a file"
        ) from None
    if not rows:
        raise DataError("data holds no rows: give at least one, and for training as many as rollout.prompts_per_step")
    return rows


OF_RECIPES = ("qerl.train", "qerl.sft")  # functions that take a recipe
OF_TRL = {"reward_funcs": "reward", "train_dataset": "data", "environment_factory": "environment", "args": "recipe"}


def check_keywords(given: Iterable[str], known: Sequence[str], function: str) -> None:
    """Raise ConfigError, with the nearest name, for a keyword that a function does not take."""
    for name in given:
        if name not in known:
            close = nearest(name, known, 0.5) if name not in OF_TRL else OF_TRL[name]
            hint = f"did you mean {close}? " if close else ""
            rest = ", and other keys of a recipe go through Recipe.set" if function in OF_RECIPES else ""
            raise ConfigError(f"{function} takes no argument {name!r}; {hint}it takes {', '.join(known)}{rest}")


def typed(kind: type, given: Mapping[str, Any], function: str) -> dict[str, Any]:
    """Values for fields of a command's options, as the fields' annotations have them. Raises ConfigError for a value of
    another type; a choice that is not known is left to the command, which names the others."""
    from pydantic import TypeAdapter, ValidationError

    hints, found = get_type_hints(kind), {}
    for name, value in given.items():
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            found[name] = TypeAdapter(hints[name]).validate_python(plain)
        except ValidationError as error:
            wrong = next((each for each in error.errors() if each["type"] != "none_required"), error.errors()[0])
            if wrong["type"] != "literal_error" or not isinstance(plain, str):
                said = wrong["msg"].replace("Input should", "it should")
                raise ConfigError(f"{function}: {name} is {short(value)}: {said}") from None
            found[name] = plain
    return found


def model_name(model: object) -> str:
    """A model as commands name it: a name, a path, or a run or model of this interface. Else raises ConfigError."""
    named = getattr(model, "path", model)
    if not isinstance(named, str | os.PathLike):
        raise ConfigError(
            f"{short(model)} is no model: give a hub id, the path of a base, adapter or run, a Run, or 'tiny'"
        )
    return os.fspath(named)


def _listed(value: Any) -> Any:
    """A number or array of numpy or torch as plain Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a value of the type {type(value).__name__}")


Given = str | Callable[..., Any]


def environment_keys(environment: Given | None, tools: Sequence[Given]) -> dict[str, Any]:
    """What a recipe says for them: the objects by their names."""
    found: dict[str, Any] = {} if environment is None else {"environment.name": environment_name(environment)}
    return found | ({"environment.tools": [environment_name(tool) for tool in tools]} if tools else {})


@contextmanager
def given_environments(environment: Given | None, tools: Sequence[Given]) -> Iterator[None]:
    """Within it, recipes may name the objects among them. Raises ConfigError for a name that means something else."""
    before = dict(KNOWN), set(TOOLS)
    try:
        for one, is_tool in ((environment, False), *((tool, True) for tool in tools)):
            if one is None or isinstance(one, str):
                continue
            name = environment_name(one)
            plain = name.removeprefix(f"{PYTHON}:")
            if KNOWN.get(plain, one) is not one:
                raise ConfigError(f"{plain!r} is the name of another environment or tool here: rename this one")
            for each in (name, plain):  # the latter in runs of earlier versions
                register(each, one, tool=is_tool)
        yield
    finally:
        KNOWN.clear()
        KNOWN.update(before[0])
        ENVIRONMENTS.clear()
        ENVIRONMENTS.update(KNOWN)
        TOOLS.clear()
        TOOLS.update(before[1])


def environment_name(given: Given) -> str:
    """The name of an environment or a tool for a recipe, `python:NAME` for an object. Raises ConfigError."""
    if isinstance(given, str):
        return given
    own = getattr(given, "func", given)  # of a functools.partial
    name = getattr(own, "__name__", "")
    if not callable(given) or not name.isidentifier():
        raise ConfigError(
            f"{given!r:.60} is no environment and no tool: give a class or a function with a name, or write its name"
        )
    return f"{PYTHON}:{name}"


def listed_tools(tools: Given | Sequence[Given]) -> tuple[Given, ...]:
    """One tool or several, as a tuple."""
    return (tools,) if isinstance(tools, str) or callable(tools) else tuple(tools)


SOURCE_KEYS = (
    "data",
    "reward",
    *(key for key in SourceConfig.model_fields if key not in ("name", "source", "rewards")),
)
CHAT = ("prompt", "messages")  # columns by which rows show that they bring their own prompt


def is_sources(data: object) -> bool:
    """Whether `data` names several sources. Raises DataError for the splits of a data set, which are none."""
    if type(data).__name__ in ("DatasetDict", "IterableDatasetDict"):
        splits = ", ".join(map(str, data))
        raise DataError(f"data has the splits {splits}: give one of them, such as data['{next(iter(data), 'train')}']")
    return isinstance(data, Mapping)


def sources_of(
    data: Mapping[str, Any], functions: Functions, run_dir: Path
) -> tuple[list[dict[str, Any]], dict[str, GivenRows]]:
    """`data.sources` for a recipe, and the given rows by the files in `run_dir` that will hold them."""
    if not data:
        raise DataError("data names no source: give {'name': rows, ...}, or the rows themselves")
    sources, given = [], {}
    for name, value in data.items():
        this = dict(value) if isinstance(value, Mapping) else {"data": value}
        check_keywords(this, SOURCE_KEYS, f"source {name}")
        rows = this.pop("data", None)
        own: dict[str, Any] = {"name": str(name)}
        if is_path(rows):
            own["source"] = os.fspath(rows)
        elif rows is not None:
            own["source"] = str(run_dir / rows_file(str(name)))
            given[own["source"]] = plain_rows(rows)
            if "task" not in this and brings_prompts(given[own["source"]], ("question",)):
                own["task"] = "own"
        elif "task" not in this:
            raise ConfigError(f"source {name} has no rows: give data, or a task that has rows of its own")
        if (reward := this.pop("reward", None)) is not None:
            own["rewards"] = rewards_of(reward, functions)
        grader = grader_of(this.pop("grader", None), functions)
        sources.append({**own, **this, **({} if grader is None else {"grader": grader})})
    return sources, given


def brings_prompts(rows: Sequence[Mapping[str, Any]], readable: Sequence[str]) -> bool:
    """Whether rows have prompts or messages, and no column that a task reads its question from."""
    columns = {name for row in rows for name in row}
    return not columns & set(readable) and bool(columns & set(CHAT))
