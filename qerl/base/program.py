"""What a Python program gives in place of names: its own functions as rewards and graders, and its own rows as data.

A recipe names a given function as `python:NAME`. It runs in the program's own process, so that it may use whatever the
program has (a loaded model, a variable of a notebook), which no other process could import; pickling it by value would
bring a copy of all that. In exchange nothing limits its time, and if it ends the process, the run ends too. A function
that is named by its file runs in a process of its own (qerl/base/own_function.py).

Rows are given under the name of the file in the run directory that will hold them, so that the run can be resumed.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl.base.errors import ConfigError, QerlError
from qerl.base.files import replace_text
from qerl.base.isolate import OwnFunctionError, ReturnedError, one_line
from qerl.base.own_function import Caller, seed_all

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
