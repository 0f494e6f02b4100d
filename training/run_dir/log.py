"""What a run writes down: metrics.jsonl (one line a step), samples of completions, warnings, and a line for people.

Metrics under time/, speed/ and memory/ describe the machine; all others follow from the configuration alone, so that a
resumed run can be compared with an uninterrupted one line by line.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl.errors import CheckpointError
from qerl.files.disk import replace_text
from training.run_dir.progress import Display, completions_table, numbers
from training.run_dir.watch import due, findings

logger = logging.getLogger(__name__)

# TRL's name -> ours; what is missing here keeps its name.
NAMES = {
    "frac_reward_zero_std": "groups/zero_variance_share",
    "completions/mean_length": "completions/mean_tokens",
    "completions/min_length": "completions/min_tokens",
    "completions/max_length": "completions/max_tokens",
    "completions/clipped_ratio": "completions/truncated_share",
    "completions/mean_terminated_length": None,
    "completions/min_terminated_length": None,
    "completions/max_terminated_length": None,
    "num_tokens": "tokens_total",
    "clip_ratio/low_mean": "clip/low_share",
    "clip_ratio/high_mean": "clip/high_share",
    "clip_ratio/region_mean": "clip/share",
    "cispo_clip_ratio": "clip/high_share",  # it has one bound
    "clip_ratio/low_min": None,
    "clip_ratio/high_max": None,
    "step_time": None,  # without the optimizer; ours is time/step_s
    "epoch": None,
}
# All that a run logs: these names, and what stands under these folders; a test holds them to a run. Not grades/, which
# the accuracy reward logs, and with it a reward that is built on it.
RUN_METRICS = (
    *("step", "loss", "reward", "reward_std", "entropy", "entropy_coef", "policy_loss", "aux_loss", "kl"),
    *("mismatch_kl", "grad_norm", "learning_rate", "tokens_total"),
)
RUN_FOLDERS = (
    *("rewards/", "sampled/", "completions/", "groups/", "clip/", "clip_ratio/", "sampling/", "mismatch/"),
    *("correction/", "noise/", "dynamic_sampling/", "time/", "speed/", "memory/"),
)
WARNINGS = "warnings.jsonl"
MACHINE_PREFIXES = ("time/", "speed/", "memory/")


def rename(logs: Mapping[str, float | None]) -> dict[str, float | None]:
    """TRL's metrics in our words; those that repeat others are dropped, what is not finite becomes None (JSON null)."""
    renamed = {}
    for key, value in logs.items():
        if key.startswith("rewards/") and key.endswith("/mean"):
            name: str | None = key.removesuffix("/mean")
        elif key.startswith("rewards/") and key.endswith("/std"):
            name = None
        else:
            name = NAMES.get(key, key)
        if name is not None:
            renamed[name] = value if value is None or math.isfinite(value) else None
    return renamed


def is_own(name: str) -> bool:
    """Whether a run logs a metric of that name itself."""
    return name in (*RUN_METRICS, *NAMES) or name.startswith(RUN_FOLDERS)


def means(metrics: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """The mean of each metric's values that are not NaN; None if nothing is left."""
    valid = {key: [value for value in values if not math.isnan(value)] for key, values in metrics.items()}
    return {key: sum(values) / len(values) if values else None for key, values in valid.items()}


def completion_rows(logs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The latest rollout from TRL's `_logs`: prompt, completion, rewards by name, advantage."""
    names = list(logs["rewards"])
    columns = [logs["prompt"], logs["completion"], logs["advantages"], *(logs["rewards"][name] for name in names)]
    return [
        {
            "prompt": row[0],
            "completion": row[1],
            "advantage": row[2],
            "rewards": dict(zip(names, row[3:], strict=True)),
        }
        for row in zip(*columns, strict=True)
    ]


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` of the rows at equal distances: a sample of a rollout with different prompts in it."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def deterministic(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that do not depend on the machine."""
    return {key: value for key, value in metrics.items() if not key.startswith(MACHINE_PREFIXES)}


class RunLog:
    """Writes into one run directory; a context manager around the training loop."""

    def __init__(self, run_dir: Path, steps: int, console: Console | None = None) -> None:
        self._run_dir = run_dir
        self._steps = steps
        self._console = console or Console(stderr=True)
        self._display: Display | None = None
        self._rows: list[dict[str, Any]] = []  # of all steps so far
        self._told: dict[str, int] = {}  # kind of warning -> the step at which it was written last

    def __enter__(self) -> RunLog:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._display = Display(self._steps, self._console)
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None

    def phase(self, name: str) -> None:
        """What the run is doing from now on: rollout, grading, training, saving. For a terminal alone."""
        if self._display is not None:
            self._display.phase(name)

    def start_at(self, step: int) -> None:
        """Drop what a killed run wrote after `step`, so that the files continue as one run."""
        kept = [row for row in read_metrics(self._run_dir) if row["step"] <= step]
        replace_text(self._run_dir / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        self._rows = kept
        if self._display is not None and kept:
            self._display.step(kept, self._steps)
        self._keep_warnings(step)
        for file in (self._run_dir / "completions").glob("step-*.jsonl"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()

    def write_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append one line, on disk before this returns, and show it. Raises CheckpointError if the disk refuses."""
        row = {"step": step, **dict(sorted(metrics.items()))}
        try:
            with (self._run_dir / "metrics.jsonl").open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(row, allow_nan=False) + "\n")
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            raise CheckpointError(
                f"the metrics of step {step} could not be written ({error}): free some disk space and run `qerl train "
                f"--resume {self._run_dir}`, which continues after the last checkpoint"
            ) from error
        self._rows.append(row)
        self._show(step)
        self._warn(step)

    def write_completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """A sample of the step's completions, one JSON object a line; on a terminal some of them are shown."""
        rows = list(rows)
        folder = self._run_dir / "completions"
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        (folder / f"step-{step:06d}.jsonl").write_text(text, encoding="utf-8")
        if self._display is not None:
            self._console.print(completions_table(step, rows))

    def _warn(self, step: int) -> None:
        """Write and show what a person should know at this step."""
        for finding in due(findings(self._rows), self._told, step):
            self._told[finding.kind] = step
            row = {"step": step, "kind": finding.kind, "text": finding.text}
            with (self._run_dir / WARNINGS).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(row) + "\n")
            style = "yellow" if self._console.is_terminal else None
            self._console.print(
                f"warning at step {step}: {finding.text}", style=style, highlight=False, markup=False, soft_wrap=True
            )

    def _keep_warnings(self, step: int) -> None:
        """Drop those after `step`; what was told before keeps its cool-down."""
        path = self._run_dir / WARNINGS
        if path.exists():
            kept = [row for row in _read_rows(path) if row["step"] <= step]
            replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._told = {row["kind"]: row["step"] for row in kept}

    def _show(self, step: int) -> None:
        if self._display is not None:
            self._display.step(self._rows, self._steps)
        else:
            line = f"step {step}/{self._steps}  {numbers(self._rows[-1])}"
            self._console.print(line, highlight=False, soft_wrap=True)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a line that is not one (a kill cuts the last one short) is left out and named."""
    path = run_dir / "metrics.jsonl"
    return _read_rows(path) if path.exists() else []


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:  # not UTF-8, or not JSON
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            logger.warning("%s: line %d is not a step's and is dropped", path, number)
    return rows
