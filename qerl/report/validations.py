"""The validations of a run as a table, with the best one marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.report.summary import rounded

if TYPE_CHECKING:
    from qerl.report.read import Run

HEADING = ["step", "accuracy", "95% interval", "reward", "tokens", "truncated", "seconds", ""]


def validation_table(run: Run) -> tuple[list[str], list[list[str]]] | None:
    """Heading and cells, one line per validation; None for a run without."""
    rows = run.validations
    if not rows:
        return None
    if any(row.get("validation/loss") is not None for row in rows):
        return _losses(rows)
    key = f"validation/{((run.config.get('validation') or {}).get('metric')) or 'accuracy'}"
    values = [row[key] for row in rows if row["step"] and row.get(key) is not None]
    best = next((row["step"] for row in rows if row["step"] and values and row.get(key) == max(values)), None)
    return HEADING, [[*_cells(row), "best" if row["step"] == best else ""] for row in rows]


def _losses(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Of a run on given conversations, whose validations measure the loss of held-out rows."""
    values = {row["step"]: row["validation/loss"] for row in rows}
    best = min((step for step in values if step), key=values.get, default=None)
    cells = [[str(row["step"]), _number(row, "loss"), _seconds(row)] for row in rows]
    return ["step", "loss", "seconds", ""], [[*each, "best" * (each[0] == str(best))] for each in cells]


def _cells(row: Mapping[str, Any]) -> list[str]:
    accuracy, low, high = (_share(row, name) for name in ("accuracy", "accuracy_low", "accuracy_high"))
    return [
        str(row["step"]),
        accuracy,
        f"{low} to {high}" if low and high else "",
        _number(row, "reward"),
        _number(row, "mean_tokens"),
        _share(row, "truncated_share"),
        _seconds(row),
    ]


def _seconds(row: Mapping[str, Any]) -> str:
    seconds = row.get("time/validation_s")
    return "" if seconds is None else f"{seconds:.1f}"


def _share(row: Mapping[str, Any], name: str) -> str:
    value = row.get(f"validation/{name}")
    return "" if value is None else f"{value:.1%}"


def _number(row: Mapping[str, Any], name: str) -> str:
    value = row.get(f"validation/{name}")
    return "" if value is None else rounded(value)
