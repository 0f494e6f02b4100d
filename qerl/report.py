"""What a run did, for people: curves (curves.png), before and after, completions side by side (report.md).

Reads the run's metrics.jsonl and the folders of `qerl eval`; writes into the run directory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from qerl.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

PAIRS_SHOWN = 3
# (title, metrics drawn)
PANELS = (
    ("reward", ("reward",)),
    ("entropy of the policy (nats)", ("entropy",)),
    ("sigma of the norm noise", ("noise/sigma",)),
    ("tokens a completion", ("completions/mean_tokens",)),
    ("mismatch_kl, sampling against trainer (nats)", ("mismatch_kl",)),
    ("seconds a step", ("time/rollout_s", "time/train_s")),
)


def write_report(run: Path, before: Path | None = None, after: Path | None = None) -> Path:
    """Write curves.png and report.md into `run` and show the report. Raises DataError for a run without metrics."""
    if (before is None) != (after is None):
        raise ConfigError("a comparison needs both: write `--before FOLDER --after FOLDER`, or neither")
    rows = _read_jsonl(run / "metrics.jsonl")
    if not rows:
        raise DataError(f"{run} has no steps in metrics.jsonl yet: give the directory of a run that has begun")
    draw_curves(rows, run / "curves.png", run.name)
    sections = [f"# {run.name}", _training(rows)]
    if before and after:
        sections += [_comparison(before, after), _pairs(before, after)]
    text = "\n\n".join(sections) + "\n"
    path = run / "report.md"
    path.write_text(text, encoding="utf-8")
    Console().print(Markdown(text))
    logger.info("report: %s, curves: %s", path, run / "curves.png")
    return path


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """One panel for each of PANELS over the steps; the reward also as a mean over the last tenth of the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 3).flatten()
    for axis, (label, keys) in zip(axes, PANELS, strict=True):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=key.partition("/")[2], linewidth=1.2)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if len(keys) > 1:
            axis.legend(fontsize=8)
    steps, smoothed = _smooth([(row["step"], row["reward"]) for row in rows if row.get("reward") is not None])
    axes[0].plot(steps, smoothed, linewidth=2.2)
    figure.savefig(path, dpi=120)


def _smooth(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    width = max(1, len(points) // 10)
    means = [
        sum(value for _, value in points[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(points))
    ]
    return [step for step, _ in points], means


def _training(rows: Sequence[Mapping[str, Any]]) -> str:
    fifth = max(1, len(rows) // 5)
    lines = ["| training | first steps | last steps |", "|---|---|---|"]
    for label, key in (
        ("reward", "reward"),
        ("entropy", "entropy"),
        ("tokens a completion", "completions/mean_tokens"),
        ("truncated share", "completions/truncated_share"),
        ("mismatch_kl", "mismatch_kl"),
        ("seconds a step", "time/step_s"),
    ):
        first, last = (_mean([row.get(key) for row in part]) for part in (rows[:fifth], rows[-fifth:]))
        if first is not None and last is not None:
            lines.append(f"| {label} | {first:.4g} | {last:.4g} |")
    return "\n".join(lines) + f"\n\n{len(rows)} steps; each column is the mean of {fifth}. Curves: curves.png"


def _comparison(before: Path, after: Path) -> str:
    results = [_read_json(folder / "result.json") for folder in (before, after)]
    lines = [f"| {results[0]['task']} | before | after |", "|---|---|---|"]
    accuracies = [result["accuracy"] for result in results]
    lines.append("| **accuracy** | " + " | ".join(f"**{value['value']:.1%}**" for value in accuracies) + " |")
    intervals = [f"{value['low']:.1%} to {value['high']:.1%}" for value in accuracies]
    lines.append(f"| 95% interval | {intervals[0]} | {intervals[1]} |")
    for label, key in (("truncated", "truncated_share"), ("no answer", "no_answer_share")):
        lines.append(f"| {label} | {results[0][key]:.1%} | {results[1][key]:.1%} |")
    return "\n".join(lines)


def _pairs(before: Path, after: Path) -> str:
    """Completions of the same question before and after, where training turned wrong into right if it did so at all."""
    first = {(row["id"], row["sample"]): row for row in _read_jsonl(before / "completions.jsonl")}
    second = {(row["id"], row["sample"]): row for row in _read_jsonl(after / "completions.jsonl")}
    shared = [key for key in first if key in second]
    turned = [key for key in shared if second[key]["correct"] > first[key]["correct"]] or shared
    spread = turned[:: max(1, len(turned) // PAIRS_SHOWN)][:PAIRS_SHOWN]  # neighbours are of one length and kind
    return "\n\n".join(_pair(first[key], second[key]) for key in spread)


def _pair(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    marks = ["right" if row["correct"] else "wrong" for row in (before, after)]
    return (
        f"**{before['question'].strip()}** (answer {before['answer']})\n\n"
        f"- before ({marks[0]}): `{_one_line(before['completion'])}`\n"
        f"- after ({marks[1]}): `{_one_line(after['completion'])}`"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")[:300]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): give the folder of a finished `qerl eval`") from error


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): give a run directory or an evaluation's folder") from error
