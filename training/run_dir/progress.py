"""What a terminal or a notebook shows during a run: a bar with the latest numbers, and some completions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from qerl.base.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_ROWS = 3
LONGEST = 240  # characters of a prompt or completion

BAR = "{desc} {n_fmt}/{total_fmt} |{bar:12}| {remaining} left{postfix}"

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


class Display:
    """A bar that stays at the bottom of the terminal, or in a notebook's cell; what is logged is printed above it."""

    def __init__(self, steps: int, console: Console) -> None:
        # tqdm shows nothing on a terminal that does not tell its size, as in some containers; rich then assumes one.
        size = {} if console.is_jupyter else {"ncols": console.width - 1, "nrows": console.height}
        self._bar = tqdm(total=steps, desc="starting", bar_format=BAR, file=console.file, disable=False, **size)
        self._file = console.file
        self._above = logging_redirect_tqdm()
        self._above.__enter__()

    def close(self) -> None:
        self._above.__exit__(None, None, None)
        self._bar.close()

    def phase(self, name: str) -> None:
        """Show what the run is doing from now on."""
        self._bar.set_description_str(name)

    def start_at(self, step: int) -> None:
        """Count from the steps that are done."""
        self._bar.initial = self._bar.n = step
        self._bar.refresh()

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""
        self._bar.set_postfix_str(numbers(row, NUMBERS | MACHINE_NUMBERS), refresh=False)
        self._bar.update(row["step"] - self._bar.n)

    @contextmanager
    def above(self) -> Iterator[None]:
        """Within it, what is printed to the terminal stands above the bar."""
        with self._bar.external_write_mode(file=self._file):
            yield


def completions_table(step: int, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Some of a step's sampled completions as a table. Of long texts it shows start and end, where the answer is."""
    table = Table("rewards", "prompt", "completion", title=f"step {step}", title_justify="left", show_lines=True)
    for row in list(rows)[:SHOWN_ROWS]:
        rewards = "\n".join(f"{name} {value:.3g}" for name, value in row["rewards"].items() if value is not None)
        table.add_row(*(Text(text) for text in (rewards, _cut(row["prompt"]), _said(row))))
    return table


def _said(row: Mapping[str, Any]) -> str:
    """A completion, or the turns of an episode, each in a line of its own."""
    if len(turns := row.get("turns", ())) < 2:
        return _cut(row["completion"])
    return "\n".join(f"{turn['role']}: {_cut(turn['text'])}" for turn in turns)


def _cut(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
