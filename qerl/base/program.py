"""What a Python program gives in place of names: its own functions as rewards and graders, and its own rows as data.

A recipe names a given function as `python:NAME`. It runs in the program's own process, so that it may use whatever the
program has (a loaded model, a variable of a notebook), which no other process could import; pickling it by value would
bring a copy of all that. An alarm limits its time; but a call that blocks within C is not interrupted, and if it ends
the process, the run ends too. A function that is named by its file runs in a process of its own
(qerl/base/own_function.py).

Rows are given under the name of the file in the run directory that will hold them, so that the run can be resumed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

from qerl.base.errors import ConfigError, QerlError
from qerl.base.files import replace_text
from qerl.base.isolate import LateError, OwnFunctionError, ReturnedError, raised
from qerl.base.own_function import ENVIRONMENTS, Caller, seed_all, seed_of, signature_of

logger = logging.getLogger(__name__)

PYTHON = "python"  # stands before the name of a given function, where a file's path would stand
ROWS = "given-rows.jsonl"  # in the run directory
LONGEST_S = 1e8  # that an alarm is set for

Rows = Sequence[Mapping[str, Any]]

_functions: dict[str, GivenFunction] = {}
_rows: dict[str, Rows] = {}


def rows_file(source: str) -> str:
    """The name of the file in the run directory that holds the given rows of one of several sources."""
    return f"given-rows-{source}.jsonl"


def source_of(given: Callable[..., Any]) -> bytes:
    """What tells a function or a class from another: its text, or where Python does not have that its compiled code."""
    if isinstance(given, type):  # the text of a class is looked up by its name, which a notebook gives again and again
        parts = {name: getattr(each, "__func__", each) for name, each in vars(given).items()}
        texts = {name: source_of(each).decode("latin-1") for name, each in parts.items() if inspect.isfunction(each)}
        plain = {name: each for name, each in parts.items() if isinstance(each, str | int | float | list | tuple)}
        own = {name: each for name, each in plain.items() if not name.startswith("__")}
        return json.dumps([texts, own], skipkeys=True, default=lambda each: type(each).__name__).encode()
    try:
        return inspect.getsource(given).encode(errors="replace")
    except (OSError, TypeError):
        if isinstance(given, functools.partial):
            bound = repr((given.args, sorted(given.keywords.items())))
            return source_of(given.func) + re.sub(r" at 0x[0-9a-f]+", "", bound).encode()
        code = getattr(given, "__code__", None)
        name = getattr(given, "__qualname__", "")  # of a function in C, which has no source
        return source_of(type(given)) + name.encode() if code is None else _compiled(code)


def _compiled(code: CodeType) -> bytes:
    """What compiled code does, in the same bytes in each process: without addresses, and with sets in order."""
    consts = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in code.co_consts]
    parts = [_compiled(each) if isinstance(each, CodeType) else repr(each).encode() for each in consts]
    return b"".join([code.co_code, repr(code.co_names).encode(), *parts])


class GivenFunction:
    """A function of the program, called as an OwnFunction is, in the thread that asks."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Raises ConfigError for what cannot be called with columns."""
        self.__name__, self._function = name, function
        try:
            self._caller = Caller(function)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{function!r} cannot grade ({error}): give a function, or a name") from None
        self.__signature__ = signature_of(self._caller.parameters, self._caller.alone)

    def __call__(
        self, expected: int, timeout_s: float, fixed: Mapping[str, Any] | None = None, /, **columns: Any
    ) -> list[float]:
        """`expected` numbers, one per completion.

        Raises OwnFunctionError for what it raises, or if it takes longer than `timeout_s` (which is kept in the main
        thread alone), and ReturnedError for what it returns.
        """
        fixed = dict(fixed or {})
        own = {name: values if name == ENVIRONMENTS else _copied(values) for name, values in columns.items()}
        try:
            with _seeded(seed_of(fixed, columns)), self._state_kept(), _limited(timeout_s):
                return self._caller.call(own, fixed, expected)
        except (ReturnedError, QerlError, KeyboardInterrupt):  # the second is raised by `log_metric`
            raise
        except _LateError:
            raise LateError(f"did not return within {timeout_s:g} s", self._caller.index) from None
        except BaseException as error:  # also SystemExit
            raise OwnFunctionError(f"raised {raised(error)}", self._caller.index) from error

    @contextmanager
    def _state_kept(self) -> Iterator[None]:
        """Put back what a function may leave changed that a run depends on."""
        torch, home = sys.modules.get("torch"), os.getcwd()
        before = None if torch is None else (torch.is_grad_enabled(), torch.get_default_dtype())
        try:
            yield
        finally:
            if before is not None:
                torch.set_grad_enabled(before[0])
                torch.set_default_dtype(before[1])
            if not _is_here(home):
                os.chdir(home)
                logger.warning("%s changed the working directory, which is changed back after each call", self)

    @property
    def source(self) -> bytes:
        """What tells this function from another."""
        return source_of(self._function)

    @property
    def sources(self) -> list[tuple[str, bytes]]:
        """Its name and source alone: what it imports or closes over is not known."""
        return [(str(self), self.source)]

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
            replace_text(Path(name), "".join(_line(row) for row in rows))


def _line(row: Mapping[str, Any]) -> str:
    """The row as a line of JSON, in plain characters where each of them is whole."""
    text = json.dumps(row, ensure_ascii=False)
    halves = any("\ud800" <= character <= "\udfff" for character in text)
    return (json.dumps(row) if halves else text) + "\n"


def _copied(values: Any) -> Any:
    """A column as a function may change it. What cannot be copied is the program's own object."""
    try:
        return copy.deepcopy(values)
    except Exception:
        return list(values) if isinstance(values, list) else values


def _is_here(folder: str) -> bool:
    try:
        return os.getcwd() == folder
    except OSError:  # the function removed the folder that it went to
        return False


class _LateError(BaseException):
    """Raised within a function that takes too long; no `except Exception` of its own takes it."""


@contextmanager
def _limited(timeout_s: float) -> Iterator[None]:
    """Raise _LateError after `timeout_s`, again and again, in the main thread, which alone has signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise _LateError

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, late)
    left, every = signal.setitimer(signal.ITIMER_REAL, min(timeout_s, LONGEST_S), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if left:  # the program's own alarm
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), every)


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
