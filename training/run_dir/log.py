"""The log of a run: metrics.jsonl with one line per step, samples of completions, warnings, and lines for people.

Metrics under time/, speed/ and memory/ describe the machine. All others depend only on the configuration, so that a
resumed run can be compared with an uninterrupted one line by line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from qerl.base.errors import CheckpointError
from qerl.base.files import parse_json, read_lines, replace_text
from qerl.base.printable import SafeConsole, printable
from qerl.report.read import completions_step
from training.run_dir.verdict import sentence, validations
from training.run_dir.watch import due, findings

if TYPE_CHECKING:
    import torch

    from training.loss.groups import GradedGroup, Sample
    from training.rewards.rewards import Rewards


logger = logging.getLogger(__name__)

WARNINGS = "warnings.jsonl"


class RunLog:
    """Writes the log of one run. It is a context manager around the training loop."""

    def __init__(
        self, run_dir: Path, steps: int, console: Console | None = None, report_to: Sequence[str] = ()
    ) -> None:
        """`report_to` names the trackers that get samples of completions, too."""
        self.run_dir = run_dir
        self._steps = steps
        self._report_to = report_to
        self._console = console or SafeConsole(stderr=True)
        self._display: Display | None = None
        self._rows: list[dict[str, Any]] = []  # of all steps so far
        self._at_start: dict[str, Any] | None = None  # the validation before the first step
        self._told: dict[str, int] = {}  # kind of warning -> the step at which it was written last

    def __enter__(self) -> RunLog:
        on_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        if on_terminal or self._console.is_jupyter:
            self._display = Display(self._steps, self._console)
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None

    def phase(self, name: str) -> None:
        """Show on a terminal what the run is doing from now on: rollout, grading, training, validation, saving."""
        if not (self._console.is_terminal or self._console.is_jupyter):  # it may have gone
            self.__exit__()
        if self._display is not None:
            self._display.phase(name)

    def _print(self, shown: Any, style: str | None = None) -> None:
        """Show it, above the bar if there is one."""
        with self._display.above() if self._display is not None else nullcontext():
            self._console.print(shown, style=style, highlight=False, markup=False, soft_wrap=isinstance(shown, str))

    def start_at(self, step: int) -> None:
        """Drop what a killed run wrote after `step`, so that the files continue as one run."""
        kept = [row for row in read_metrics(self.run_dir) if row["step"] <= step]
        self._at_start = next((row for row in kept if row["step"] == 0), None)
        self._rows = [row for row in kept if row["step"] > 0]
        self._rewrite()
        if self._display is not None:
            self._display.start_at(step)
        self._keep_warnings(step)
        for file in (self.run_dir / "completions").glob("step-*.jsonl"):
            if (completions_step(file) or 0) > step:
                file.unlink()

    def write_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append one line, flush it to disk, and show it. Raises CheckpointError if it cannot be written."""
        row = {"step": step, **dict(sorted(metrics.items()))}
        with self._written(step), (self.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row, allow_nan=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        self._rows.append(row)
        if self._display is not None:
            self._display.step(row)
        else:
            self._print(f"step {step}/{self._steps}  {numbers(row)}")
        self._show_validation(row)
        self._warn(step)

    @property
    def validations(self) -> list[Mapping[str, Any]]:
        """The rows with a validation so far, that before the first step included."""
        return validations(self._all())

    def write_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a validation to the line of a step that is already there; step 0, before the first one, has only this."""
        earlier = next((row for row in self._rows if row["step"] == step), {"step": step})
        both = {key: value for key, value in {**earlier, **metrics}.items() if key != "step"}
        row = {"step": step, **dict(sorted(both.items()))}
        if step:
            self._rows = [row if each["step"] == step else each for each in self._rows]
        else:
            self._at_start = row
        with self._written(step):
            self._rewrite()
        self._show_validation(row)

    def _all(self) -> list[dict[str, Any]]:
        return [*([self._at_start] if self._at_start else []), *self._rows]

    def _rewrite(self) -> None:
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self._all())
        replace_text(self.run_dir / "metrics.jsonl", text)

    @contextmanager
    def _written(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the metrics of step {step} could not be written ({error}): free some disk space and run `qerl train "
                f"--resume {self.run_dir}`, which continues after the last checkpoint"
            ) from error

    def write_completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a sample of the step's completions, one JSON object per line, and show some of them on a terminal."""
        rows = list(rows)
        folder = self.run_dir / "completions"
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        (folder / f"step-{step:06d}.jsonl").write_text(text, encoding="utf-8", errors="replace")
        if rows and self._report_to:
            from training.run_dir.trackers import log_table  # loads transformers

            self._report_to = log_table(self._report_to, step, rows)
        if self._display is not None:
            self._print(completions_table(step, rows))

    def _warn(self, step: int) -> None:
        """Write and show the warnings that are due at this step."""
        for finding in due(findings(self._rows), self._told, step):
            self._told[finding.kind] = step
            row = {"step": step, "kind": finding.kind, "text": finding.text}
            with (self.run_dir / WARNINGS).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(row) + "\n")
            self._print(f"warning at step {step}: {finding.text}", "yellow" if self._console.is_terminal else None)

    def _keep_warnings(self, step: int) -> None:
        """Drop the warnings after `step`. Earlier ones keep their cool-down."""
        path = self.run_dir / WARNINGS
        if path.exists():
            kept = [row for row in _read_rows(path, _is_warning) if row["step"] <= step]
            replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._told = {row["kind"]: row["step"] for row in kept}

    def _show_validation(self, row: Mapping[str, Any]) -> None:
        if validations([row]):
            self._print(sentence(row))


class NoLog(RunLog):
    """The log of a rank that writes nothing."""

    def _nothing(self, *_: object) -> None:
        pass

    phase = start_at = write_step = write_validation = write_completions = _nothing


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A damaged line, such as one truncated by a kill, is left out with a warning."""
    path = run_dir / "metrics.jsonl"
    return _read_rows(path, _is_metrics) if path.exists() else []


def _is_metrics(row: Mapping[str, Any]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in row.values())


def _is_warning(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("kind"), str)


def _read_rows(path: Path, fits: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            row = parse_json(line.decode("utf-8"))
        except ValueError:  # not UTF-8, or not JSON
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int) and fits(row):
            rows.append(row)
        else:
            logger.warning("%s: line %d is not the record of a step and is dropped", path, number)
    return rows


def completion_rows(
    groups: Sequence[GradedGroup], advantages_P_G: torch.Tensor, rewards: Rewards
) -> list[dict[str, Any]]:
    """A rollout as rows for people to read: prompt, completion, its length and whether that is the limit, advantage,
    rewards by name, what they logged of it as `extra`, and which of several sources it is of."""
    names, sources = rewards.names, rewards.source_names
    return [
        {
            "prompt": graded.group.prompt.text,
            "completion": text,
            "tokens": sample.written,
            "truncated": sample.truncated,
            "advantage": advantage,
            "rewards": {name: own for name, own in zip(names, rewards_F, strict=True) if not math.isnan(own)},
            **({"extra": dict(extra)} if extra else {}),
            **({"source": sources[graded.group.prompt.source]} if any(sources) else {}),
            **_episode_row(sample),
        }
        for graded, advantages in zip(groups, advantages_P_G.tolist(), strict=True)
        for sample, text, advantage, rewards_F, extra in zip(
            graded.group.samples,
            graded.texts,
            advantages,
            graded.rewards_G_F.tolist(),
            graded.extra or [{}] * len(graded.texts),
            strict=True,
        )
    ]


def _episode_row(sample: Sample) -> dict[str, Any]:
    """What a row says of an episode besides: its turns, and how it ended."""
    episode = sample.episode
    if episode is None:
        return {}
    turns = [{"role": turn.role, "text": turn.text, "tokens": turn.tokens} for turn in episode.turns]
    return {"turns": turns, "ended": episode.error or episode.ended}


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` of the rows at equal distances, so that a sample of a rollout has different prompts."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


# -- what a terminal or a notebook shows: a bar with the latest numbers, and some completions

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
        self._bar.set_description_str(name)

    def start_at(self, step: int) -> None:
        self._bar.initial = self._bar.n = step
        self._bar.refresh()

    def step(self, row: Mapping[str, Any]) -> None:
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
