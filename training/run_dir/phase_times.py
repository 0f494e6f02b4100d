"""Seconds of a step by phase, on one timeline: that of the GPU by CUDA events, that of the clock where there is no GPU.

Work for a GPU is queued, and a clock beside it would time the queueing. An event stands in the queue between the work
of two phases and is read once, at the end of the step, when the GPU has done all of it: nothing waits for a time. What
the host does while the GPU is still busy counts for what it takes longer, so that no second belongs to two phases.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    Mark = torch.cuda.Event | float  # a place in the GPU's queue, or seconds of the clock


class PhaseTimes:
    """The phases of one step after another; a phase may come many times in a step, and never within another."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.begin_step()

    def begin_step(self) -> None:
        """What comes from here on is of a new step."""
        self._began = time.perf_counter()
        self._spans: list[tuple[str, Mark, Mark]] = []

    def begin(self, name: str) -> None:
        self._open = name, self._mark()

    def end(self) -> None:
        """End the phase that began last."""
        self._spans.append((*self._open, self._mark()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`begin` and `end` around a block; one that raises ends the run, and has no time."""
        self.begin(name)
        yield
        self.end()

    def metrics(self, counted_s: float) -> dict[str, float]:
        """time/NAME_s of each phase so far, time/step_s since `begin_step` by the clock, and time/other_s, the rest.

        `counted_s`: what of the step others have timed. To be called where the GPU has nothing left to do.
        """
        seconds: dict[str, float] = defaultdict(float)
        if self._on_gpu and self._spans:
            self._spans[-1][2].synchronize()  # the event itself: what is before it has been done
        for name, start, end in self._spans:
            seconds[f"time/{name}_s"] += start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
        step_s = time.perf_counter() - self._began
        return {**seconds, "time/step_s": step_s, "time/other_s": step_s - counted_s - sum(seconds.values())}

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
