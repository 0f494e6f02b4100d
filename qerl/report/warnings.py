"""The warnings that a run logged: each kind once, with all of its steps and its latest figures."""

from __future__ import annotations

from qerl.report.read import Run


def latest_warnings(run: Run) -> list[tuple[str, str]]:
    """For each kind of warning its steps and its latest text, in the order in which the kinds first occurred."""
    by_kind: dict[str, list[dict]] = {}
    for row in run.warnings:
        by_kind.setdefault(row["kind"], []).append(row)
    return [(", ".join(str(row["step"]) for row in rows), str(rows[-1]["text"])) for rows in by_kind.values()]
