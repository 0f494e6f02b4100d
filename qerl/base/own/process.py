"""A process for code that is not ours: whatever it does, it can be ended from outside, and what ended it becomes words.

It reads requests (bytes) from a socket and answers with JSON; qerl/base/own/worker.py calls a function in it, and
qerl/episodes/worker.py hosts environments.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing import Pipe
from typing import Any

from qerl.base.own.returned import one_line

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

    def __init__(self, name: str, worker: str = "qerl.base.own.worker") -> None:
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
