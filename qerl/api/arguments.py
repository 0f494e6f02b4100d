"""Arguments of the Python interface, and the process that it runs in.

The state of a Python program that a call of qerl puts back when it ends, however it ends.

A command may change its process as it likes. A program goes on: with its environment, loggers, random generators and
torch's settings as they were, and without an engine that holds a card's memory. One thing stays: once CUDA has
started, the process keeps its card, and CUDA_VISIBLE_DEVICES says which.

Arguments of Python calls as recipes and commands name them: functions, rows and models.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from qerl.base.devices import ORDER, VISIBLE
from qerl.base.errors import ConfigError, DataError
from qerl.base.program import PYTHON
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
