"""What a terminal shows during a run: its progress, the latest numbers, and from time to time some completions."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from qerl.base.printable import printable

REFRESH_PER_S = 2  # not more often, since drawing takes time from the training thread
TIMED_STEPS = 10  # the time left is estimated from the mean of the latest steps
SHOWN_ROWS = 3
LONGEST = 240  # characters of a prompt or completion

# metric -> (name, format), in the order of the display
NUMBERS = {
    "nll": ("loss", ".4f"),
    "kl_to_teacher/forward": ("kl to teacher", ".4f"),
    "reward": ("reward", ".3f"),
    "entropy": ("entropy", ".3f"),
    "noise/sigma": ("sigma", ".1e"),
    "mismatch_kl": ("mismatch", ".1e"),
    "completions/mean_tokens": ("tokens", ".0f"),
    "environment/turns": ("turns", ".1f"),
    "carry_over/mean_age": ("age", ".2f"),
    "time/step_s": ("s/step", ".1f"),
}
MACHINE_NUMBERS = {
    "speed/rollout_tokens_per_s": ("tokens/s", ",.0f"),
    "speed/tokens_per_s": ("tokens/s", ",.0f"),
    "memory/peak_gib": ("GiB", ".1f"),
}

SOURCE = re.compile(r"sources/([^/]+)/reward")  # the reward of one of several sources


def numbers(row: Mapping[str, Any], shown: Mapping[str, tuple[str, str]] = NUMBERS) -> str:
    """The metrics of a step in one line, without those that the step does not have, and the reward of each source."""
    found = [f"{name} {row[key]:{form}}" for key, (name, form) in shown.items() if row.get(key) is not None]
    sources = [(match[1], row[key]) for key in row if (match := SOURCE.fullmatch(key))]
    of_sources = [f"{name} {value:.3f}" for name, value in sources if value is not None]
    return "  ".join([*found, *of_sources])


def time_left(rows: Sequence[Mapping[str, Any]], steps: int) -> str:
    """The time until step `steps` at the pace of the latest steps, as text; empty before the first step."""
    times = [row["time/step_s"] for row in rows[-TIMED_STEPS:] if row.get("time/step_s") is not None]
    if not times:
        return ""
    minutes, seconds = divmod(round(sum(times) / len(times) * (steps - rows[-1]["step"])), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"


def completions_table(step: int, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Some of a step's sampled completions as a table. Of long texts it shows start and end, where the answer is."""
    table = Table("rewards", "prompt", "completion", title=f"step {step}", title_justify="left", show_lines=True)
    for row in list(rows)[:SHOWN_ROWS]:
        rewards = "\n".join(f"{name} {value:.3g}" for name, value in row["rewards"].items() if value is not None)
        table.add_row(*(Text(text) for text in (rewards, _cut(row["prompt"]), _said(row))))
    return table


def validation_text(row: Mapping[str, Any]) -> str:
    """A validation's accuracy, or its reward if it has none, or the loss of held-out rows."""
    accuracy, loss = row.get("validation/accuracy"), row.get("validation/loss")
    if loss is not None:
        return f"loss {loss:.4f}"
    return f"reward {row['validation/reward']:.3f}" if accuracy is None else f"{accuracy:.1%}"


class Display(Progress):
    """Two lines that stay at the bottom of the terminal; log messages are printed above them."""

    def __init__(self, steps: int, console: Console) -> None:
        columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(20), _Phase(), TextColumn("{task.fields[left]}")]
        self._numbers = self._validation = ""  # set first, since super() already renders
        super().__init__(*columns, console=console, refresh_per_second=REFRESH_PER_S)
        self._task = self.add_task("", total=steps, phase="starting", since=time.monotonic(), left="")
        self._handlers: list[logging.StreamHandler] = []

    def start(self) -> None:
        stream = sys.stderr
        super().start()  # replaces sys.stderr by a stream that prints above the lines
        self._handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream
        ]
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def stop(self) -> None:
        super().stop()
        for handler in self._handlers:
            handler.setStream(sys.stderr)
        self._handlers = []

    def phase(self, name: str) -> None:
        """Show what the run is doing from now on."""
        self.update(self._task, phase=name, since=time.monotonic())

    def step(self, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Show the last of `rows`, the metrics of the steps so far, and the progress towards `steps`."""
        self._numbers = numbers(rows[-1], NUMBERS | MACHINE_NUMBERS)
        self.update(self._task, completed=rows[-1]["step"], left=time_left(rows, steps))

    def validated(self, row: Mapping[str, Any]) -> None:
        """Show this validation from now on."""
        self._validation = f"  validation {validation_text(row)} at step {row['step']}"

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self._numbers + self._validation, no_wrap=True, overflow="ellipsis")


class _Phase(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['phase']} {time.monotonic() - task.fields['since']:.0f} s", style="cyan")


def _said(row: Mapping[str, Any]) -> str:
    """A completion, or the turns of an episode, each in a line of its own."""
    if len(turns := row.get("turns", ())) < 2:
        return _cut(row["completion"])
    return "\n".join(f"{turn['role']}: {_cut(turn['text'])}" for turn in turns)


def _cut(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
