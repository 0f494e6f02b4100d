"""Comparing answers with math-verify in worker processes, within a limit of processor time, from any thread.

Only what qerl/data/formulas/equality.py does not decide itself comes here.

Workers (qerl/data/grading/math_worker.py) start when they are first needed, at most MAX_WORKERS of them, and do one
comparison at a time. A worker that does not answer is ended and replaced, so no formula can hang or end a run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from qerl.base.errors import EngineError

log = logging.getLogger(__name__)

MAX_WORKERS = min(8, os.cpu_count() or 1)
# The worker limits processor time itself. This limit is only for a worker that hangs without using any: it is so long
# that a busy machine does not reach it.
REPLY_LIMIT_S = 120.0
START_LIMIT_S = 120.0
CACHE_SIZE = 20_000  # pays off because the completions of one prompt mostly state the same few answers
_ATTEMPTS = 2
_STARTS = 3


class _NotStartedError(Exception):
    pass


class Worker:
    """One worker process. Not thread-safe: `_Pool` lends it to one thread at a time."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("math_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            bufsize=0,
        )
        if self._read_line(START_LIMIT_S) != "ready":
            self.close()
            raise _NotStartedError

    @classmethod
    def start(cls) -> Worker:
        """A worker that is ready. One that dies while it starts (memory that ran out for a moment) is started anew."""
        for attempt in range(1, _STARTS + 1):
            with contextlib.suppress(_NotStartedError):
                return cls()
            log.warning("the process that compares formulas did not start (attempt %d of %d)", attempt, _STARTS)
        raise EngineError(
            f"the process that compares formulas did not start within {START_LIMIT_S:.0f} s: run "
            f"`{sys.executable} -c 'import math_verify'` to see why (math-verify 0.9.0 has to be installed)"
        )

    def compare(self, gold: str, answer: str) -> str | None:
        """The verdict of the worker; None if it died or did not answer."""
        request = json.dumps({"gold": gold, "answer": answer}) + "\n"
        try:
            self._process.stdin.write(request.encode())
        except OSError:
            return None
        return self._read_line(REPLY_LIMIT_S)

    def _read_line(self, limit_s: float) -> str | None:
        poll = select.poll()  # select() fails for the high file descriptors of a process with many open files
        poll.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline().decode() if poll.poll(limit_s * 1000) else ""
        return line.strip() or None

    def close(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class _Pool:
    """Up to MAX_WORKERS workers, lent to one thread at a time."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._slots = threading.BoundedSemaphore(MAX_WORKERS)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """Lend an idle worker or a new one. It goes back to the pool unless the block raises."""
        with self._slots:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker or Worker.start()
            try:
                yield worker
            except BaseException:
                worker.close()
                raise
            with self._lock:
                self._idle.append(worker)

    def close(self) -> None:
        """End the idle workers. Does nothing in a forked child, whose copy of this pool belongs to the parent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            while self._idle:
                self._idle.pop().close()


class _NoReplyError(Exception):
    pass


@functools.cache
def _pool(pid: int) -> _Pool:
    """The pool of the process `pid`, which keeps a forked child from using the pipes of its parent."""
    pool = _Pool()
    atexit.register(pool.close)
    return pool


def compare(gold: str, answer: str) -> str:
    """Whether two formulas are equal as mathematics: one of qerl.data.grading.math_worker.VERDICTS. Thread-safe.

    Only "equal" and "different" are kept for the next time: a timeout may be the machine's fault, not the formula's.
    """
    try:
        return _decided(gold, answer)
    except _UndecidedError as error:
        return error.verdict


class _UndecidedError(Exception):
    def __init__(self, verdict: str) -> None:
        super().__init__(verdict)
        self.verdict = verdict


@functools.lru_cache(CACHE_SIZE)
def _decided(gold: str, answer: str) -> str:
    """ "equal" or "different"; raises _UndecidedError, which the cache does not keep, for any other verdict."""
    verdict = _ask(gold, answer)
    if verdict not in ("equal", "different"):
        raise _UndecidedError(verdict)
    return verdict


def forget() -> None:
    """Empty the cache of verdicts."""
    _decided.cache_clear()


def _ask(gold: str, answer: str) -> str:
    for _ in range(_ATTEMPTS):
        try:
            with _pool(os.getpid()).worker() as worker:
                verdict = worker.compare(gold, answer)
                if verdict is None:
                    raise _NoReplyError
                return verdict
        except _NoReplyError:
            log.warning("the process that compares formulas gave no verdict on %r and is replaced", answer[:80])
    return "timeout"


def close() -> None:
    """End this process's workers; the next comparison starts new ones."""
    _pool(os.getpid()).close()
