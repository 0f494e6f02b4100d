"""A run directory as the report reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl.errors import DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run wrote. `rows` has the metrics of each step, in order."""

    folder: Path
    rows: list[Row] = field(repr=False)

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def read_run(folder: Path) -> Run:
    """Raises DataError for a folder without metrics."""
    rows = read_jsonl(folder / "metrics.jsonl")
    if not rows:
        raise DataError(f"{folder} has no steps in metrics.jsonl yet: give the directory of a run that has begun")
    return Run(folder, rows)


def read_json(path: Path) -> dict[str, Any]:
    """Raises DataError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): give the folder of a finished `qerl eval`") from error


def read_jsonl(path: Path) -> list[Row]:
    """The whole lines of a file (a kill can cut the last one short). Raises DataError if it cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): give a run directory or an evaluation's folder") from error
