"""A process for code that is not ours: whatever it does, it can be ended from outside, and what ended it becomes words.

A process reads requests (bytes) from a socket and answers with JSON. `Process` is one whose code is the user's: a
function (qerl/base/own_function.py) or environments (qerl/episodes/runner.py). `Workers` are a few that do what a
file of others says, within limits that they set themselves: chat templates and tokenizers (qerl/base/sandbox.py), and
formulas (qerl/data/grading/math_pool.py). What a function of the user's may return stands here too.
"""

import atexit
import contextlib
import fcntl
import importlib.util
import json
import logging
import math
import os
import reprlib
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from qerl.base.errors import EngineError

LARGEST = 1e15  # the sum of the squares of a group's rewards still fits into float32
LONGEST = 300  # characters of an error that are shown

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class ReturnedError(Exception):
    """What a reward returned cannot be used: `what`, and the number of the completion, None for all of them."""

    def __init__(self, what: str, index: int | None = None) -> None:
        super().__init__(what)
        self.what, self.index = what, index


def numbers(returned: Any, expected: int) -> list[float]:
    """One number for each of `expected` completions, NaN where there is None. Raises ReturnedError.

    At most one value too many is taken, since a generator may have no end.
    """
    given = f"for {expected} completions"
    if isinstance(returned, Set):
        raise ReturnedError(f"returned a {type(returned).__name__}, which has no order, {given}: return a list instead")
    if isinstance(returned, str | bytes | Mapping):
        raise ReturnedError(f"returned {short(returned)} {given}")
    try:
        iterator = iter(returned)
    except TypeError:
        raise ReturnedError(f"returned {short(returned)} {given}") from None
    values = list(islice(iterator, expected + 1))
    if len(values) != expected:
        raise ReturnedError(f"returned {_count(returned, values, expected)} values {given}")
    return [_number(value, index) for index, value in enumerate(values)]


def _number(value: Any, index: int) -> float:
    if value is None:  # as in TRL: it says nothing about this completion
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str | bytes) or not abs(number) <= LARGEST:
        raise ReturnedError(f"returned {short(value)}, which is not a finite number (of at most {LARGEST:g})", index)
    return number


def _count(returned: Any, values: list[Any], expected: int) -> str:
    try:
        return str(len(returned))
    except TypeError:
        return str(len(values)) if len(values) < expected else f"more than {expected}"


def short(value: Any) -> str:
    """The value as an error shows it, also if it cannot be shown."""
    try:
        return one_line(_SHORT.repr(value))
    except BaseException:
        return f"a {type(value).__name__}"


def one_line(value: object) -> str:
    """The text of a value in one line, without control characters, cut to LONGEST characters."""
    try:
        text = str(value)
    except BaseException as error:
        return f"(its text cannot be had: {type(error).__name__})"
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST]).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def raised(error: BaseException, file: str | None = None) -> str:
    """What an error of the user's code says, with the last line of their `file` that it came from, if it is known."""
    said, frames = one_line(error), traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}{f': {said}' if said else ''}{where}"


def load_module(place: str) -> ModuleType:
    """The module of a file, or the one of that name."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(f"qerl_own_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up the module of a class here
    spec.loader.exec_module(module)
    return module


STARTS = 3
START_S = 120.0
OURS = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
LONGEST_LINE = 1000  # characters of a printed line
AT_ONCE = 2**15  # bytes that a connection takes whatever the other process does; Linux takes 200,000
SOON_S = 0.05
BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); descriptor, alive = map(int, sys.argv[2:4]); "
    "worker = sys.argv[4]; sys.argv[:] = ['']; importlib.import_module('qerl.base.isolate').end_with(alive); "
    "importlib.import_module(worker).main(descriptor)"
)

logger = logging.getLogger(__name__)


_closed: list[contextlib.ExitStack] = []  # of each `closed_at_end` around


@contextlib.contextmanager
def closed_at_end() -> Iterator[None]:
    """At its end, whatever happened, what was given to `at_end` within it is called, the last one first."""
    with contextlib.ExitStack() as ending:  # one that cannot be closed leaves none of the others open
        _closed.append(ending)
        try:
            yield
        finally:
            _closed.remove(ending)


def at_end(close: Callable[[], None]) -> None:
    """Call `close` where the innermost `closed_at_end` ends; without one the caller calls it."""
    if _closed:
        _closed[-1].callback(close)


class OwnFunctionError(Exception):
    """The function raised, or its process ended. Says what happened, beginning with a verb.

    `index` is the number of the completion that it was called with alone; None if it got several, or is not known.
    """

    def __init__(self, what: str, index: int | None = None) -> None:
        super().__init__(what)
        self.index = index


class LateError(OwnFunctionError):
    """The function did not return in time."""


class Process:
    """A process that runs the `main` of the module `worker`, in a session of its own: Ctrl-C does not reach it, and
    what it starts ends with it."""

    def __init__(self, name: str, worker: str, ours: bool = False) -> None:
        """What a worker prints is logged under `name`. One of `ours` is quiet instead, and sees no card."""
        self._closed, self._pid, self._ours = False, os.getpid(), ours
        self._connection, theirs = Pipe()
        alive, held = os.pipe()
        self._held = os.fdopen(held, "wb")  # closed when this process ends, however it does
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, json.dumps(sys.path), str(theirs.fileno()), str(alive), worker],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if ours else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **OURS} if ours else None,
            pass_fds=[theirs.fileno(), alive],
            start_new_session=True,
        )
        theirs.close()
        os.close(alive)
        if not ours:
            threading.Thread(target=_log_lines, args=(self._popen.stdout, name), daemon=True).start()
        _running.add(self)

    def send(self, request: bytes) -> None:
        """Give it a request, whose reply `receive` gets. Raises OSError if the process has ended."""
        self._connection.send_bytes(request)

    def receive(self) -> bytes:
        """Wait for its next reply. Raises EOFError or OSError if the process has ended."""
        while not self._connection.poll(0.5):  # a child of the function's may hold the other end open
            if self._popen.poll() is not None and not self._connection.poll(0):
                raise EOFError
        return self._connection.recv_bytes()

    def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """The reply to a request. Raises LateError or OwnFunctionError; the process has then ended."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self.close()

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        at_once = self._ours and len(request) <= AT_ONCE
        try:
            if not at_once:
                timer.start()
            self.send(request)
            if at_once and not self._connection.poll(SOON_S):  # a thread for every row would cost more than the row
                timer.start()
            reply = json.loads(self.receive())
            if late.is_set():
                raise EOFError
            return reply
        except (EOFError, OSError, ValueError) as error:
            if late.is_set():
                raise LateError(f"did not return within {timeout_s:g} s") from None
            raise OwnFunctionError(self.ending()) from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process and all that it has started."""
        if not self._closed and self._pid == os.getpid():  # once: later the number may belong to another process
            self._closed = True
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._held.close()

    def ending(self) -> str:
        """How the process ended by itself."""
        try:
            code = self._popen.wait(5)
        except subprocess.TimeoutExpired:
            self.close()
            return "closed the connection to the run"
        if code >= 0:
            return f"ended its process (os._exit or the like, with code {code})"
        killed = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if killed == "SIGKILL" else ""
        return f"ended its process by the signal {killed}{hint}"


class Workers:
    """Up to `most` processes of one of our workers, whose `main` calls `serve`. Thread-safe.

    They start when they are first needed, and answer one request at a time each. One that dies or is late is ended, and
    the next request starts another. A forked child starts its own, as it must not use the connections of its parent.
    """

    def __init__(self, name: str, worker: str, needs: str, most: int = 1) -> None:
        """`needs` is the module without which the worker cannot start, for the error."""
        self._name, self._worker, self._needs, self._most = name, worker, needs, most
        self._begin()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to a request that is not empty. Raises LateError, OwnFunctionError, or EngineError."""
        if self._pid != os.getpid():
            self._begin()
        with self._slots:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or self._start()
            try:
                reply = process.ask(json.dumps(request).encode(), timeout_s)
            except BaseException:  # its reply would be taken for the reply to the next request
                process.close()
                raise
            with self._lock:
                self._idle.append(process)
            return reply

    def close(self) -> None:
        """End the idle processes; the next request starts new ones."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._slots = threading.BoundedSemaphore(self._most)
        self._idle: list[Process] = []

    def _start(self) -> Process:
        """A process that is ready. One that dies while it starts (memory that ran out for a moment) is replaced."""
        for attempt in range(1, STARTS + 1):
            process = Process(self._name, self._worker, ours=True)
            try:
                process.ask(b"{}", START_S)
                return process
            except OwnFunctionError as error:
                said = error
                logger.warning("the process that %s %s (attempt %d of %d)", self._name, error, attempt, STARTS)
            except BaseException:
                process.close()
                raise
        raise EngineError(
            f"the process that {self._name} did not start (it {said}): run "
            f"`{sys.executable} -c 'import {self._needs}'` to see why"
        )


def end_with(alive: int) -> None:
    """In a worker: let the kernel end it, and what it starts, once the other end of the pipe `alive` is closed.

    A thread beside foreign code would see that the other process has ended only when that code lets it run.
    """
    os.set_inheritable(alive, False)
    with contextlib.suppress(OSError, AttributeError):  # where there is no such signal, the connection's end is enough
        fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)


def serve(descriptor: int, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """In a worker of `Workers`: answer requests until the other end is closed."""
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(answer(request) if request else {}).encode())


_running: weakref.WeakSet[Process] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for process in list(_running):
        process.close()


def _log_lines(output: Any, name: str) -> None:
    """Log what the function prints, line by line."""
    with output:
        while line := output.readline(LONGEST_LINE):
            if text := one_line(line.decode("utf-8", "replace")):
                logger.info("%s: %s", name, text)
