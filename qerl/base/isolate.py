"""A process for code that is not ours, and what it may return.

What a reward or a grader returned, as one finite number per completion.

A process for code that is not ours: whatever it does, it can be ended from outside, and what ended it becomes words.

It reads requests (bytes) from a socket and answers with JSON; qerl/base/own_function.py calls a function in it, and
qerl/episodes/worker.py hosts environments.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import reprlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Set
from itertools import islice
from multiprocessing import Pipe
from typing import Any

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
    """One number for each of `expected` completions. Raises ReturnedError.

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


LONGEST_LINE = 1000  # characters of a printed line
BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); descriptor = int(sys.argv[2]); "
    "worker = sys.argv[3]; sys.argv[:] = ['']; importlib.import_module(worker).main(descriptor)"
)

logger = logging.getLogger(__name__)


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

    def __init__(self, name: str, worker: str) -> None:
        self._closed = False
        self._connection, theirs = Pipe()
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, json.dumps(sys.path), str(theirs.fileno()), worker],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
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
        timer.start()
        try:
            self.send(request)
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
        if not self._closed:  # once: later, the number may be that of another process
            self._closed = True
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)

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
