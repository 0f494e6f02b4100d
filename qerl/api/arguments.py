"""Arguments of the Python interface, and the process that it runs in.

The state of a Python program that a call of qerl puts back when it ends, however it ends.

A command may change its process as it likes. A program goes on: with its environment, loggers, random generators and
torch's settings as they were, and without an engine that holds a card's memory. One thing stays: once CUDA has
started, the process keeps its card, and CUDA_VISIBLE_DEVICES says which.

What a Python program gives in place of names: its own functions as rewards and graders, and its own rows as data.

A recipe names a given function as `python:NAME`. It runs in the program's own process, so that it may use whatever the
program has (a loaded model, a variable of a notebook), which no other process could import; pickling it by value would
bring a copy of all that. In exchange nothing limits its time, and what ends the process ends the run. A function that
is named by its file runs in a process of its own (qerl/base/own_function.py).

Rows are given under the name of the file in the run directory that will hold them, so that the run can be resumed.

Arguments of Python calls as recipes and commands name them: functions, rows and models.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl.base.devices import ORDER, VISIBLE
from qerl.base.errors import ConfigError, DataError, QerlError
from qerl.base.files import replace_text
from qerl.base.isolate import ReturnedError, one_line
from qerl.base.own_function import Caller, OwnFunctionError, seed_all
from qerl.cli.terminal import NOISY_LOGGERS, quiet_libraries_
from qerl.config.keys import nearest
from qerl.engine.open import engines_closed_on_error


@contextmanager
def as_before() -> Iterator[None]:
    """Within it libraries are quiet; afterwards the program's state is what it was. Imports torch."""
    environment = dict(os.environ)
    loggers = [logging.getLogger(), *map(logging.getLogger, NOISY_LOGGERS)]
    levels = [logger.level for logger in loggers]
    quiet_libraries_()
    try:
        import torch  # before the number of threads is chosen, which would else hold for the whole program

        with _same_numbers(torch), _same_torch(torch), engines_closed_on_error():
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
def _same_numbers(torch: Any) -> Iterator[None]:
    """Put the states of the random generators back."""
    import numpy

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cards is not None:
            torch.cuda.set_rng_state_all(cards)


@contextmanager
def _same_torch(torch: Any) -> Iterator[None]:
    """Put torch's settings back."""
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    dtype, threads, gradients = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        torch.set_float32_matmul_precision(precision)


PYTHON = "python"  # stands before the name of a given function, where a file's path would stand
ROWS = "given-rows.jsonl"  # in the run directory

Rows = Sequence[Mapping[str, Any]]

_functions: dict[str, GivenFunction] = {}
_rows: dict[str, Rows] = {}


def rows_file(source: str) -> str:
    """The name of the file in the run directory that holds the given rows of one of several sources."""
    return f"given-rows-{source}.jsonl"


class GivenFunction:
    """A function of the program, called as an OwnFunction is, in the thread that asks."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Raises ConfigError for what cannot be called with columns."""
        self.__name__, self._function = name, function
        try:
            self._caller = Caller(function)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{function!r} cannot grade ({error}): give a function, or a name") from None
        names = {"completion": "completions"} if self._caller.alone else {}
        self.__signature__ = inspect.Signature(
            [each.replace(name=names.get(each.name, each.name)) for each in self._caller.parameters]
        )

    def __call__(
        self, expected: int, timeout_s: float, fixed: Mapping[str, Any] | None = None, /, **columns: Any
    ) -> list[float]:
        """`expected` numbers, one per completion; `timeout_s` is not kept, since nothing could end the function.

        Raises OwnFunctionError for what it raises, and ReturnedError for what it returns.
        """
        fixed = dict(fixed or {})
        seed = zlib.crc32(repr((fixed.get("step"), columns.get("completions"))).encode("utf-8", "replace"))
        own = {name: [list(one) if isinstance(one, list) else one for one in columns[name]] for name in columns}
        try:
            with _seeded(seed):
                return self._caller.call(own, fixed, expected)
        except (ReturnedError, QerlError):  # the latter is raised by `log_metric`
            raise
        except Exception as error:
            said = one_line(error)
            what = f"raised {type(error).__name__}{f': {said}' if said else ''}"
            raise OwnFunctionError(what, self._caller.index) from error

    @property
    def source(self) -> bytes:
        """What tells this function from another: its text, or where Python does not have that its compiled code."""
        try:
            return inspect.getsource(self._function).encode()
        except (OSError, TypeError):
            code = getattr(self._function, "__code__", None)
            return b"" if code is None else code.co_code + repr(code.co_consts).encode()

    def __str__(self) -> str:
        return f"{PYTHON}:{self.__name__}"


@contextmanager
def given(functions: Mapping[str, Callable[..., Any]], rows: Mapping[str, Rows]) -> Iterator[None]:
    """Within it, recipes may name these functions, as `python:NAME`, and these rows, by the paths of their files."""
    before = dict(_functions), dict(_rows)
    _functions.update({name: GivenFunction(name, function) for name, function in functions.items()})
    _rows.update(rows)
    try:
        yield
    finally:
        for now, was in zip((_functions, _rows), before, strict=True):
            now.clear()
            now.update(was)


def given_function(kind: str, name: str) -> GivenFunction:
    """The function that a recipe names `python:NAME`. Raises ConfigError if the program has not given it."""
    if name not in _functions:
        raise ConfigError(
            f"{kind} {PYTHON}:{name} is a function of the Python program that began the run: go on there, with "
            f"qerl.train(resume=RUN, {kind}={name}), or name a function of a file, path/to/file.py:{name}"
        )
    return _functions[name]


def given_rows(source: str) -> Rows | None:
    """The rows that were given under this name; None if there are none."""
    return _rows.get(source)


def write_given_rows(folder: Path) -> None:
    """Write the rows whose files belong into `folder`, which is there."""
    for name, rows in _rows.items():
        if Path(name).parent == folder:
            replace_text(Path(name), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed what a function may draw from, and put the program's own random states back afterwards."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    before = random.getstate()
    of_numpy = numpy.random.get_state() if numpy else None
    try:
        if torch is None:
            seed_all(seed)
            yield
        else:
            with torch.random.fork_rng():
                seed_all(seed)
                yield
    finally:
        random.setstate(before)
        if of_numpy is not None:
            numpy.random.set_state(of_numpy)


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
    if isinstance(given, Mapping):
        name = given.get("name")
        return {**given, "name": functions.name_of(name)} if callable(name) else dict(given)
    if callable(given):
        return {"name": functions.name_of(given)}
    if isinstance(given, str):
        return {"name": given}
    raise ConfigError(
        f"reward={given!r} is no reward: give a function, a name such as 'accuracy' or 'rewards.py:short', a mapping "
        "with name, weight and args, or a list of these"
    )


def grader_of(grader: str | Function | None, functions: Functions) -> str | None:
    """A grader's name for a recipe or an evaluation."""
    return functions.name_of(grader) if callable(grader) else grader


def is_path(data: object) -> bool:
    """Whether `data` names rows (a file, a folder, a hub id), and is not the rows themselves."""
    return isinstance(data, str | os.PathLike)


def plain_rows(data: GivenRows) -> list[dict[str, Any]]:
    """The rows as a jsonl file gives them back: a list of mappings, a data set of `datasets`, a pandas table.

    Raises DataError for what is no table of JSON values.
    """
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a pandas table, which would give its columns' names
        data = data.to_dict("records")
    rows = []
    try:
        for number, row in enumerate(data, start=1):
            if not isinstance(row, Mapping):
                raise DataError(f"row {number} of data is {_short(row)}: give mappings, such as {{'prompt': ...}}")
            rows.append(json.loads(json.dumps(dict(row), default=_listed, allow_nan=False)))
    except (TypeError, ValueError) as error:
        where = f"row {len(rows) + 1} of data cannot be kept as JSON" if rows or not _is_scalar(data) else "data is"
        what = f" ({error})" if where != "data is" else f" {_short(data)}"
        raise DataError(
            f"{where}{what}: give a list of mappings with text, numbers and lists, or the path of a file"
        ) from None
    if not rows:
        raise DataError("data holds no rows: give at least as many as rollout.prompts_per_step")
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


def model_name(model: object) -> str:
    """A model as commands name it: a name, a path, or a run or model of this interface. Else raises ConfigError."""
    named = getattr(model, "path", model)
    if not isinstance(named, str | os.PathLike):
        raise ConfigError(
            f"{_short(model)} is no model: give a hub id, the path of a base, adapter or run, a Run, or 'tiny'"
        )
    return os.fspath(named)


def _is_scalar(data: object) -> bool:
    return not isinstance(data, Iterable)


def _listed(value: Any) -> Any:
    """A number or array of numpy or torch as plain Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a value of the type {type(value).__name__}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
