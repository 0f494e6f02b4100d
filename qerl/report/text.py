"""What a run did in words and tables: report.md, and the same on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from qerl.errors import ConfigError
from qerl.report.curves import draw_curves
from qerl.report.read import read_json, read_jsonl, read_run
from qerl.report.stages import stage_table, stages

logger = logging.getLogger(__name__)

PAIRS_SHOWN = 3


def write_report(run: Path, before: Path | None = None, after: Path | None = None) -> Path:
    """Write curves.png and report.md into `run` and show the report. Raises DataError for a run without metrics."""
    if (before is None) != (after is None):
        raise ConfigError("a comparison needs both: write `--before FOLDER --after FOLDER`, or neither")
    found = read_run(run)
    draw_curves(found, run / "curves.png")
    sections = [f"# {found.name}", _training(found.rows), *_stages(found.rows)]
    if before and after:
        sections += [_comparison(before, after), _pairs(before, after)]
    text = "\n\n".join(sections) + "\n"
    path = run / "report.md"
    path.write_text(text, encoding="utf-8")
    Console().print(Markdown(text))
    logger.info("report: %s, curves: %s", path, run / "curves.png")
    return path


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


def _stages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each stage of the noise did; nothing for a run without noise."""
    found = stages(rows)
    if not any(stage.sigma_high for stage in found):
        return []
    heading, cells = stage_table(found)
    table = [heading, ["---"] * len(heading), *cells]
    note = "Means by noise stage. entropy is the trained policy's, sampling entropy that of the policy that sampled."
    return ["\n".join(f"| {' | '.join(line)} |" for line in table) + f"\n\n{note}"]


def _comparison(before: Path, after: Path) -> str:
    results = [read_json(folder / "result.json") for folder in (before, after)]
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
    first = {(row["id"], row["sample"]): row for row in read_jsonl(before / "completions.jsonl")}
    second = {(row["id"], row["sample"]): row for row in read_jsonl(after / "completions.jsonl")}
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
