"""Jobs that start in threads before their results are needed, and run once even if several callers ask. No torch."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

Name, Result = TypeVar("Name"), TypeVar("Result")


class Jobs(Generic[Name, Result]):
    """Jobs by name. A job runs once, in whichever thread or caller gets to it first; other callers wait for it to end.

    Its result, or its error, is kept until somebody asks for it. Asking for it again runs the job again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Name, _Job[Result]] = {}

    def begin(self, works: Mapping[Name, Callable[[], Result]]) -> None:
        """Start these in threads, one per core, in this order; those that are already under way are left alone."""
        with self._lock:
            new = {name: _Job(work) for name, work in works.items() if name not in self._jobs}
            self._jobs |= new
        waiting = deque(new.values())
        count = min(os.cpu_count() or 1, len(new))
        threads = [threading.Thread(target=_run_all, args=(waiting,), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        if threads:
            atexit.register(_end, waiting, threads)

    def result(self, name: Name, work: Callable[[], Result]) -> Result:
        """The result of the job `name`, run here as `work` unless another thread has begun it.

        Raises whatever the job raised.
        """
        with self._lock:
            job = self._jobs.setdefault(name, _Job(work))
        try:
            return job.run().result()
        finally:
            with self._lock:
                if self._jobs.get(name) is job:
                    del self._jobs[name]


class _Job(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self._work, self._lock = work, threading.Lock()
        self._done: Future[Result] = Future()

    def run(self) -> Future[Result]:
        """Run the job, or wait until the thread that is running it is done."""
        with self._lock:
            if not self._done.done():
                try:
                    self._done.set_result(self._work())
                except BaseException as error:  # handed to whoever asks for the result
                    self._done.set_exception(error)
        return self._done


def _run_all(waiting: deque[_Job]) -> None:
    with suppress(IndexError):  # raised when none is left
        while True:
            waiting.popleft().run()


def _end(waiting: deque[_Job], threads: list[threading.Thread]) -> None:
    """Start nothing more, and wait for what is under way.

    NVRTC aborts the process if its compiler still runs while the libraries are unloaded (seen with 13.0: "LLVM ERROR",
    or a segmentation fault).
    """
    waiting.clear()
    for thread in threads:
        thread.join()
