"""Notes the calls that a thread makes, each under its caller, and phases as a whole; for profile_host.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


@dataclass
class Call:
    """A call, or a phase; seconds since the step began."""

    name: str
    at: float
    end: float = 0.0
    calls: list[Call] = field(default_factory=list)  # those of at least `least` seconds
    phase: bool = False
    frame: FrameType | None = None  # of a Python function

    @property
    def seconds(self) -> float:
        return self.end - self.at


class Recorder:
    """Notes the calls of this thread between `start` and `stop`, but within phases."""

    def __init__(self, least: float, wait: Callable[[], None]) -> None:
        """`least` are the seconds of a call that is kept; `wait` waits for the card."""
        self._least, self._wait = least, wait
        self._stack: list[Call] = []
        self._began = 0.0
        self._phases = 0  # that are open: sampling may be within another phase
        self.running = False

    def start(self) -> None:
        self.running, self._began = True, time.perf_counter()
        self._stack = [Call("step", 0.0)]
        sys.setprofile(self._event)

    def stop(self) -> Call:
        """All calls, under one that has the whole time."""
        sys.setprofile(None)
        self.running, now = False, self._now()
        while len(self._stack) > 1:
            self._close(now)
        self._stack[0].end = now
        return self._stack[0]

    def mark(self, name: str) -> None:
        """Note a moment."""
        if self.running:
            now = self._now()
            self._stack[0].calls.append(Call(name, now, now))

    def begin(self, name: str) -> None:
        """A phase begins: nothing in it is noted."""
        self._phases += 1
        if self.running and self._phases == 1:
            sys.setprofile(None)
            self._wait()
            self._open = Call(name, self._now(), phase=True)

    def end(self) -> None:
        self._phases -= 1
        if not self.running or self._phases:
            return
        self._wait()
        found = self._open
        found.end = self._now()
        going, kept = set(_frames(sys._getframe())), 1
        for depth, call in enumerate(self._stack[1:], start=2):  # what has returned since the phase began
            if call.frame is not None and call.frame not in going:
                break
            kept = depth if call.frame is not None else kept
        while len(self._stack) > kept:
            self._close(found.at)
        self._stack[-1].calls.append(found)
        sys.setprofile(self._event)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _event(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            self._stack.append(Call(_python_name(frame), self._now(), frame=frame))
        elif event == "c_call":
            self._stack.append(Call(_c_name(what), self._now()))
        elif len(self._stack) > 1 and self._stack[-1].frame is (frame if event == "return" else None):
            self._close(self._now())

    def _close(self, now: float) -> None:
        call = self._stack.pop()
        call.end = now
        if call.seconds >= self._least or call.calls:
            self._stack[-1].calls.append(call)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _python_name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"


def _c_name(what: Any) -> str:
    owner = getattr(what, "__module__", None) or type(getattr(what, "__self__", None)).__name__
    return f"{owner}.{what.__name__}"
