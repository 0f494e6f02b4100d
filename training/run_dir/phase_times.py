"""Time the phases of a step: with CUDA events on a GPU, with the clock without one.

Work for a GPU is queued, so a clock would measure how long the queueing takes. Instead an event is put into the queue
between two phases. All events are read at the end of the step, when the GPU has done the work, so nothing has to wait.
Work of the host counts only as far as the GPU waits for it, so that no second is counted for two phases.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    Mark = torch.cuda.Event | float  # a place in the GPU's queue, or a time of the clock in seconds


class PhaseTimes:
    """Times the phases of step after step. A phase may occur many times in a step, but never inside another."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a new step: forget the phases so far."""
        self._began = time.perf_counter()
        self._spans: list[tuple[str, Mark, Mark]] = []

    def begin(self, name: str) -> None:
        self._open = name, self._mark()

    def end(self) -> None:
        """End the phase that began last."""
        self._spans.append((*self._open, self._mark()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`begin` and `end` around a block. An error in the block ends the run, so it gets no time."""
        self.begin(name)
        yield
        self.end()

    def metrics(self, counted_s: float) -> dict[str, float]:
        """time/NAME_s for each phase so far, time/step_s by the clock since `begin_step`, and the rest as time/other_s.

        `counted_s` are the seconds of the step that were timed elsewhere. Call it when the GPU has nothing left to do.
        """
        seconds: dict[str, float] = defaultdict(float)
        if self._on_gpu and self._spans:
            # The work before the last event is done, but the event itself may not be recorded yet.
            self._spans[-1][2].synchronize()
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
