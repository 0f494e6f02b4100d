"""The noise stages of a run with the mean of its metrics in each, which shows what each sigma did to the entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

PARTS = 8  # a stage in which a controller moves sigma is shown in at most this many parts

# The table's columns: (heading, metric, format).
COLUMNS = (
    ("entropy", "entropy", ".3f"),
    ("sampling entropy", "sampling/entropy", ".3f"),
    ("reward", "reward", ".3f"),
    ("mismatch_kl", "mismatch_kl", ".1e"),
    ("ess", "correction/ess", ".3f"),
)


@dataclass(frozen=True)
class Stage:
    """Steps `first` to `last` (counted from 1), the range of their sigmas, and the mean of each metric they logged."""

    number: int
    first: int
    last: int
    sigma_low: float
    sigma_high: float
    means: dict[str, float]


def stages(rows: Sequence[Mapping[str, Any]]) -> list[Stage]:
    """The stages in order. A stage whose sigma changes, under a controller, is divided into up to PARTS equal parts."""
    noisy = [row for row in rows if row.get("noise/stage") is not None]
    found = []
    for number, members in groupby(noisy, key=lambda row: int(row["noise/stage"])):
        steps = list(members)
        moves = len({row["noise/sigma"] for row in steps}) > 1
        size = -(-len(steps) // PARTS) if moves else len(steps)
        found += [_stage(number, steps[start : start + size]) for start in range(0, len(steps), size)]
    return found


def stage_table(found: Sequence[Stage]) -> tuple[list[str], list[list[str]]]:
    """Heading and cells; metrics that no stage logged are left out."""
    columns = [column for column in COLUMNS if any(column[1] in stage.means for stage in found)]
    heading = ["stage", "steps", "sigma", *(name for name, _, _ in columns)]
    cells = [
        [
            str(stage.number),
            f"{stage.first} to {stage.last}",
            sigma_text(stage),
            *(f"{stage.means[key]:{form}}" if key in stage.means else "" for _, key, form in columns),
        ]
        for stage in found
    ]
    return heading, cells


def held_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on how often the controller's sigma was held at a bound; empty if it never was."""
    controlled = [row for row in rows if row.get("noise/at_bound") is not None]
    held = [row for row in controlled if row["noise/at_bound"]]
    if not held:
        return ""
    return (
        f"Sigma was held at a bound in {len(held)} of {len(controlled)} steps (last at {held[-1]['noise/sigma']:.2g}): "
        "its target was out of reach there."
    )


def sigma_text(stage: Stage) -> str:
    """The stage's sigma, or its range under a controller."""
    ends = dict.fromkeys(f"{sigma:.2g}" for sigma in (stage.sigma_low, stage.sigma_high))
    return " to ".join(ends)


def _stage(number: int, rows: Sequence[Mapping[str, Any]]) -> Stage:
    sigmas = [row["noise/sigma"] for row in rows]
    means = {}
    for _, key, _ in COLUMNS:
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            means[key] = sum(values) / len(values)
    return Stage(number, rows[0]["step"], rows[-1]["step"], min(sigmas), max(sigmas), means)
