"""A user's own reward or grader, a function of a file or of an importable module, in a process of its own.

The function cannot be trusted to return. Within the process of a run, nothing could end an endless loop in C, os._exit
would end the run without a word, a thread that goes on would keep it from ending, and os.chdir or a seed would change
its paths and numbers. A process can be ended from outside, and what ended it becomes one line. It is started once per
function, when the recipe is checked, and keeps what the function keeps, such as a loaded model. It costs 0.1 s at the
start and a copy of the columns that the function takes at each call.

Departures from a call in the run's process: two functions of one file share no variables, the columns are copies, and
what the function prints goes into the log.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from qerl.base.errors import ConfigError
from qerl.base.nearby import close_to
from qerl.base.own.process import LateError, OwnFunctionError, Process
from qerl.base.own.returned import ReturnedError
from qerl.data.tasks import Task

__all__ = ["LateError", "Named", "OwnFunction", "OwnFunctionError", "own_function"]

TIMEOUT_S = 300.0  # of one call, where the recipe says nothing
LOAD_S = 60.0  # that loading the file may take at least, however short the limit of a call is

logger = logging.getLogger(__name__)


class OwnFunction:
    """A function in its process, to be called with columns. Thread-safe, one call at a time.

    A function that names `completion`, and not `completions`, is called with one completion at a time, and with its
    row's value of each column. In `__signature__` it takes `completions` all the same, as every caller gives them.
    """

    def __init__(self, place: str, attribute: str, timeout_s: float = TIMEOUT_S, kind: str = "reward") -> None:
        """Load the function within `timeout_s` or LOAD_S, whichever is longer; `kind` is how the log names it.

        Raises OwnFunctionError, or AttributeError with names that are near.
        """
        self.__name__, self._kind = attribute, kind
        self._load_s = max(timeout_s, LOAD_S)
        self._place, self._attribute = place, attribute
        self._process: Process | None = None
        self._lock = threading.Lock()
        try:
            loaded = self._start()
            if "missing" in loaded:
                raise AttributeError(*loaded["missing"])
        except BaseException:
            self.close()
            raise
        self.files: list[str] = loaded["files"]  # of all modules that it has loaded, beginning with its own
        self._alone: bool = loaded["alone"]  # it takes one completion at a time
        kinds = {int(kind): kind for kind in (inspect.Parameter.POSITIONAL_ONLY, *_KINDS)}
        names = {"completion": "completions"} if self._alone else {}
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    names.get(name, name), kinds[kind], default=None if optional else inspect.Parameter.empty
                )
                for name, kind, optional in loaded["parameters"]
            ]
        )

    def __call__(
        self, expected: int, timeout_s: float, fixed: Mapping[str, Any] | None = None, /, **columns: Any
    ) -> list[float]:
        """`expected` numbers, one per completion. `fixed` are arguments that are the same for all of them.

        Raises OwnFunctionError, and ReturnedError for what it returned.
        """
        fixed = dict(fixed or {})
        log_metric = fixed.pop("log_metric", None)
        request = {
            "columns": dict(columns),
            "fixed": _picklable(fixed),
            "seed": zlib.crc32(repr((fixed.get("step"), columns.get("completions"))).encode("utf-8", "replace")),
            "logs": log_metric is not None,
            "expected": expected,
        }
        with self._lock:
            if self._process is None:
                self._start()
            reply = self._ask(request, timeout_s)
        if reply.get("moved"):
            logger.warning(
                "%s %s changed the working directory, which is changed back after each call", self._kind, self
            )
        if "returned" in reply:
            raise ReturnedError(reply["returned"], reply["index"])
        for name, value in reply["logged"]:
            log_metric(name, value)
        return reply["rewards"]

    @property
    def source(self) -> bytes:
        """The content of its file."""
        return Path(self.files[0]).read_bytes()

    def __str__(self) -> str:
        return f"{self._place}:{self._attribute}"

    def close(self) -> None:
        """End the process; the next call starts another one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> dict[str, Any]:
        self._process = Process(f"{self._kind} {self._attribute}")
        return self._ask({"place": self._place, "attribute": self._attribute}, self._load_s)

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply of the process, which is ended unless it replies."""
        try:
            reply = self._process.ask(pickle.dumps(request), timeout_s)
        except BaseException:
            self.close()
            raise
        if "raised" in reply:
            raise OwnFunctionError(f"raised {reply['raised']}", reply.get("index"))
        return reply


_KINDS = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


def _picklable(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as another process can have them: a task without functions that were not made in a module."""
    task = fixed.get("task")
    if not isinstance(task, Task):
        return dict(fixed)
    lost = {field.name: None for field in fields(task) if not _can_pickle(getattr(task, field.name))}
    return {**fixed, "task": replace(task, **lost)}


def _can_pickle(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class Named:
    """What a recipe or a command named, for errors: its `kind` ("reward"), its `name`, and the `others` that could be
    written there."""

    kind: str
    name: str
    others: str


def own_function(place: str, attribute: str, named: Named, timeout_s: float | None = None) -> OwnFunction:
    """The function `attribute` of the file or module `place`. Raises ConfigError."""
    path, is_file = Path(place).expanduser(), place.endswith(".py")
    kind, name = named.kind, named.name
    if is_file and not path.is_file():
        near = close_to(place, files=True)
        raise ConfigError(
            f"{kind} file {place!r} does not exist here ({Path.cwd()}): "
            f"{f'{near} ' if near else ''}write its path from here, or whole"
        )
    whole, changed = (str(path.resolve()), path.stat().st_mtime_ns) if is_file else (place, 0)
    try:
        return _loaded(whole, attribute, timeout_s or TIMEOUT_S, kind, changed)
    except OwnFunctionError as error:
        why = str(error).removeprefix("raised ")
        if is_file:
            raise ConfigError(f"{kind} file {place!r} cannot be imported: {why}; correct the file") from error
        raise ConfigError(
            f"{kind} {name!r}: module {place!r} cannot be imported ({why}); write package.module:function of an "
            f"installed package, path/to/file.py:function, or {named.others}"
        ) from error
    except AttributeError as error:
        hint = f"; did you mean {error.args[0]!r}?" if error.args else "; give one that is there"
        raise ConfigError(f"{kind} {name!r}: {place} has no function {attribute!r}{hint}") from None


@cache
def _loaded(place: str, attribute: str, timeout_s: float, kind: str, _mtime_ns: int) -> OwnFunction:
    """A file is loaded again only after it has changed."""
    return OwnFunction(place, attribute, timeout_s, kind)
