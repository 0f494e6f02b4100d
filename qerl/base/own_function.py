"""A user's own reward or grader: a function of a file or of an importable module, called with columns.

The function cannot be trusted to return. Within the process of a run, nothing could end an endless loop in C, os._exit
would end the run without a word, a thread that goes on would keep it from ending, and os.chdir or a seed would change
its paths and numbers. So it has a process of its own (qerl/base/isolate.py), which is started once per function, when
the recipe is checked, and keeps what the function keeps, such as a loaded model. It costs 0.1 s at the start and a copy
of the columns that the function takes at each call. A function that a Python program gives is called by `Caller` there.

Departures from a call in the run's process: two functions of one file share no variables, the columns are copies, and
what the function prints goes into the log.
"""

import asyncio
import contextlib
import difflib
import inspect
import json
import logging
import math
import os
import pickle
import random
import signal
import sys
import sysconfig
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from qerl.base.errors import ConfigError, QerlError
from qerl.base.files import close_to
from qerl.base.isolate import LateError, OwnFunctionError, Process, ReturnedError, load_module, numbers, raised, short


def loaded_files() -> list[str]:
    """The files of all modules that this process has loaded."""
    return sorted({getattr(each, "__file__", None) for each in list(sys.modules.values())} - {None})


def users_own(files: Iterable[str | Path]) -> list[Path]:
    """Those that belong neither to Python nor to an installed package nor to qerl, whose versions are noted."""
    there = (file for file in map(Path, files) if file.is_file())
    return [file for file in there if not any(file.is_relative_to(place) for place in _installed())]


@cache
def _installed() -> tuple[Path, ...]:
    paths, own = sysconfig.get_paths(), Path(__file__).parents[2]
    places = [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (*places, *(own / name for name in ("qerl", "training", "quantize", "eval")))


class Caller:
    """A function, and the event loop that its coroutines share.

    `index` is the completion with which the function was called alone; None if it takes all of them at once. `alone`
    says which: a function that names `completion`, and not `completions`, takes one at a time.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError or ValueError for a callable whose parameters cannot be known."""
        self.parameters = [*inspect.signature(function).parameters.values()]
        self.alone = {"completion", "completions"} & {p.name for p in self.parameters} == {"completion"}
        self.index: int | None = None
        self._function = function
        self._runner: asyncio.Runner | None = None

    def call(self, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any], expected: int) -> list[float]:
        """`expected` numbers. Raises ReturnedError for what it returned, and whatever the function raises."""
        self.index = None
        if "log_extra" in fixed:
            log = fixed["log_extra"]
            fixed = {**fixed, "log_extra": lambda column, values: log(str(column), [as_json(each) for each in values])}
        returned = self._one_by_one(columns, fixed) if self.alone else self._called(expected, **columns, **fixed)
        return numbers(returned, expected)

    def close(self) -> None:
        """End the event loop; the next coroutine begins another one."""
        with contextlib.suppress(BaseException):
            self._runner.close()
        self._runner = None

    def _called(self, expected: int, /, **arguments: Any) -> Any:
        """What the function returns, awaited if it has to be."""
        returned = self._function(**arguments)
        if inspect.isawaitable(returned):
            returned = self._run(_awaited(returned))
        if isinstance(returned, AsyncIterator):
            returned = self._run(_listed(returned, expected))
        return returned

    def _one_by_one(self, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any]) -> list[Any]:
        """What the function returns for each completion. An error says at which one it was."""
        names = ["completion" if name == "completions" else name for name in columns]
        returned = []
        for index, row in enumerate(zip(*columns.values(), strict=True)):
            self.index = index
            returned.append(self._called(1, **dict(zip(names, row, strict=True)), **fixed))
        return returned

    def _run(self, coroutine: Any) -> Any:
        """The result of a coroutine; where a loop runs in this thread already, as in a notebook, in another thread."""
        self._runner = self._runner or asyncio.Runner()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(coroutine)
        thread = ThreadPoolExecutor(1)
        try:
            return thread.submit(self._runner.run, coroutine).result()
        finally:
            thread.shutdown(wait=False)  # one that takes too long is not waited for


def as_json(value: Any) -> Any:
    """The value as JSON has it, also numbers and arrays of numpy and torch; what JSON cannot have, as text."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=lambda each: each.tolist()))
    except (TypeError, ValueError, AttributeError, RuntimeError):  # a sparse tensor raises the last, deep nesting too
        return short(value)


async def _awaited(returned: Any) -> Any:
    return await returned


async def _listed(returned: AsyncIterator, expected: int) -> list[Any]:
    values = []
    async for value in returned:
        values.append(value)
        if len(values) > expected:
            break
    return values


def signature_of(parameters: Sequence[inspect.Parameter], alone: bool) -> inspect.Signature:
    """What every caller gives a function: `completions`, also where it takes one `alone`."""
    names = {"completion": "completions"} if alone else {}
    return inspect.Signature([each.replace(name=names.get(each.name, each.name)) for each in parameters])


def seed_of(fixed: Mapping[str, Any], columns: Mapping[str, Any]) -> int:
    """The seed of a call, by its step and its completions."""
    return zlib.crc32(repr((fixed.get("step"), columns.get("completions"))).encode("utf-8", "replace"))


def seed_all(seed: int) -> None:
    """Make what a function draws at random the same when a run is resumed and grades the same completions."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


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
        own, *imported = loaded["files"]  # of all modules that it has loaded, beginning with its own
        self.files = [Path(own), *users_own(imported)]
        self._changed = self._times()
        kinds = {int(kind): kind for kind in type(inspect.Parameter.KEYWORD_ONLY)}
        defaults = {True: None, False: inspect.Parameter.empty}
        self.__signature__ = signature_of(
            [inspect.Parameter(name, kinds[kind], default=defaults[has]) for name, kind, has in loaded["parameters"]],
            loaded["alone"],
        )

    def __call__(
        self, expected: int, timeout_s: float, fixed: Mapping[str, Any] | None = None, /, **columns: Any
    ) -> list[float]:
        """`expected` numbers, one per completion. `fixed` are arguments that are the same for all of them.

        Raises OwnFunctionError, and ReturnedError for what it returned.
        """
        fixed = dict(fixed or {})
        logs = {name: fixed.pop(name) for name in LOGS if name in fixed}
        request = {
            "columns": dict(columns),
            "fixed": _picklable(fixed),
            "seed": seed_of(fixed, columns),
            "logs": [*logs],
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
        for log, name, value in reply["logged"]:
            logs[log](name, value)
        return [math.nan if value is None else value for value in reply["rewards"]]

    @property
    def source(self) -> bytes:
        """The content of its file."""
        return self.files[0].read_bytes()

    @property
    def sources(self) -> list[tuple[str, bytes]]:
        """Name and content of its file, and of those of the user's that it imports."""
        return [(file.name, file.read_bytes()) for file in self.files]

    @property
    def is_current(self) -> bool:
        """Whether its files are as they were loaded."""
        return self._changed == self._times()

    def _times(self) -> list[int | None]:
        return [file.stat().st_mtime_ns if file.is_file() else None for file in self.files]

    def __str__(self) -> str:
        return f"{self._place}:{self._attribute}"

    def close(self) -> None:
        """End the process; the next call starts another one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> dict[str, Any]:
        self._process = Process(f"{self._kind} {self._attribute}", __name__)
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


def _picklable(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as another process can have them: a task without functions that were not made in a module."""
    task = fixed.get("task")
    if not is_dataclass(task):
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


def own_function(
    place: str, attribute: str, named: Named, timeout_s: float | None = None, fresh: bool = True
) -> OwnFunction:
    """The function `attribute` of the file or module `place`. Raises ConfigError.

    It is loaded again where one of its files has changed, unless it need not be `fresh`: what has begun with a function
    goes on with it.
    """
    path, is_file = Path(place).expanduser(), place.endswith(".py")
    kind, name = named.kind, named.name
    wanted = (str(path.resolve()) if is_file else place, attribute, timeout_s or TIMEOUT_S, kind)
    if not fresh and wanted in _LOADED:
        return _LOADED[wanted]
    if is_file and not path.is_file():
        near = close_to(place, files=True)
        raise ConfigError(
            f"{kind} file {place!r} does not exist here ({Path.cwd()}): "
            f"{f'{near} ' if near else ''}write its path from here, or whole"
        )
    try:
        if wanted not in _LOADED or not _LOADED[wanted].is_current:
            _LOADED[wanted] = OwnFunction(*wanted)
        return _LOADED[wanted]
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


_LOADED: dict[tuple[str, str, float, str], OwnFunction] = {}

COLUMNS = ("completions", "completion_ids", "prompts", "question", "answer", "row", "task", "max_new_tokens", "step")
LOGS = ("log_metric", "log_extra")  # what a function may call
GIVEN = (*LOGS, "trainer_state")  # what it is given besides; both as TRL gives them
EPISODE_COLUMNS = ("episode_reward", "turns", "tool_calls")  # of runs with an environment
ENVIRONMENTS = "environments"  # a column of the same, where these are objects of this process, as in TRL
LEAST_SHARE_S = 1.0  # a completion that takes less is not named as the one on which a function was late


def check_columns(
    named: str,
    parameters: Mapping[str, inspect.Parameter],
    args: Iterable[str],
    extra: Iterable[str],
    further: Sequence[str] = (),
) -> None:
    """Raise ConfigError if a function needs a value that is neither one of its `args` nor a column.

    `extra` are the columns of the rows, and `further` the columns of episodes.
    """
    columns = (*COLUMNS, *further, *sorted(set(extra)), *GIVEN)
    for key, parameter in parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and key not in (*columns, *args):
            if key == ENVIRONMENTS:  # a reward of TRL's, named by its file
                raise ConfigError(
                    f"{named} asks for the environments, which it gets where both are objects of a Python program: "
                    "write get_reward in the class and the reward `environment`, or take episode_reward and turns"
                )
            near = difflib.get_close_matches(key, columns, n=1)
            hint = f"did you mean {near[0]!r}? " if near else "write one that is there; "
            raise ConfigError(
                f"{named} asks for {key!r}, which is neither among its args nor a column: {hint}the columns are "
                f"{', '.join(columns)}"
            )


def first_to_fail(call: Callable[[int, float], object], count: int, timeout_s: float) -> int | None:
    """The first of `count` completions with which alone a function fails, or takes ten times its share of `timeout_s`.

    `call` calls the function with one completion within a time limit. None if there is no such completion, or if it is
    not found within twice the limit.
    """
    end = time.monotonic() + 2 * timeout_s
    share_s = min(timeout_s, max(LEAST_SHARE_S, 10 * timeout_s / count))
    for index in range(count):
        left_s = end - time.monotonic()
        if left_s <= 0:
            return None
        try:
            call(index, min(share_s, left_s))
        except LateError:
            return index if left_s >= share_s else None
        except OwnFunctionError:
            return index
        except (ReturnedError, QerlError):
            continue
    return None


def main(descriptor: int) -> None:
    """Answer requests until the other end is closed."""
    connection, requests = Connection(descriptor), SimpleQueue()
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    worker, pid = _Worker(os.getcwd()), os.getpid()
    while True:
        reply = worker.answer(requests.get())
        if os.getpid() != pid:  # a child that the function forked, and that returned into this loop
            os._exit(0)
        connection.send_bytes(json.dumps(reply).encode())


def _receive(connection: Connection, requests: SimpleQueue) -> None:
    """Read requests beside the function, so that the end of the other process is noticed while it runs."""
    try:
        while True:
            requests.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpgid(0), signal.SIGKILL)  # this process, and what it has started


class _Worker:
    """The function, once it is loaded."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._caller: Caller | None = None
        self._file: str | None = None

    def answer(self, request: bytes) -> dict[str, Any]:
        try:
            reply = self._load(**pickle.loads(request)) if self._caller is None else self._call(pickle.loads(request))
        except ReturnedError as error:
            reply = {"returned": error.what, "index": error.index}
        except BaseException as error:  # also SystemExit, CancelledError, KeyboardInterrupt
            if not isinstance(error, Exception) and self._caller is not None:
                self._caller.close()
            reply = {"raised": raised(error, self._file), "index": None if self._caller is None else self._caller.index}
        return reply | self._back_home()

    def _load(self, place: str, attribute: str) -> dict[str, Any]:
        module = load_module(place)
        self._file = getattr(module, "__file__", None)
        function = getattr(module, attribute, None)
        if not callable(function):
            names = [name for name, _ in inspect.getmembers(module, inspect.isfunction)]
            return {"missing": difflib.get_close_matches(attribute, names, n=1)}
        self._caller = Caller(function)
        others = [file for file in loaded_files() if file != self._file]
        return {
            "parameters": [[p.name, int(p.kind), p.default is not p.empty] for p in self._caller.parameters],
            "alone": self._caller.alone,
            "files": [*([self._file] if self._file else []), *others],
        }

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers, and what the function logged."""
        columns, fixed, expected, logged = request["columns"], request["fixed"], request["expected"], []
        seed_all(request["seed"])
        own = {
            "log_metric": lambda name, value: logged.append(["log_metric", str(name), float(value)]),
            "log_extra": lambda column, values: logged.append(["log_extra", column, values]),
        }
        values = self._caller.call(columns, {**fixed, **{name: own[name] for name in request["logs"]}}, expected)
        return {"rewards": [None if math.isnan(value) else value for value in values], "logged": logged}

    def _back_home(self) -> dict[str, Any]:
        """Undo os.chdir: relative paths of the function mean the same in each call."""
        with contextlib.suppress(OSError):
            if os.getcwd() == self._home:
                return {}
        with contextlib.suppress(OSError):
            os.chdir(self._home)
        return {"moved": True}
