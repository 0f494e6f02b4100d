"""Jobs that are begun in threads before their results are asked for, and done once though several ask. No torch."""

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
    """By name. Who comes first does a job, a thread or who asks for it; whoever asks meanwhile waits for its end.

    A result, or an error, is kept until it was asked for; a job that is asked for again is done again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Name, _Job[Result]] = {}

    def begin(self, works: Mapping[Name, Callable[[], Result]]) -> None:
        """Do these in threads, a core each, in this order; none that is under way already."""
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
        """Of the job of this name, done here by `work` unless another thread has begun it. Raises what it raised."""
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
        """Do it, or wait for who does it."""
        with self._lock:
            if not self._done.done():
                try:
                    self._done.set_result(self._work())
                except BaseException as error:  # goes to who asks
                    self._done.set_exception(error)
        return self._done


def _run_all(waiting: deque[_Job]) -> None:
    with suppress(IndexError):  # none is left
        while True:
            waiting.popleft().run()


def _end(waiting: deque[_Job], threads: list[threading.Thread]) -> None:
    """Begin nothing more, and wait for what is under way: NVRTC aborts the process if its compiler runs while the
    libraries are taken down (seen with 13.0: "LLVM ERROR", or a segmentation fault)."""
    waiting.clear()
    for thread in threads:
        thread.join()
