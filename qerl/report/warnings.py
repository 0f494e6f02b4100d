"""What a run warned of while it trained: each kind once, with its steps and the latest figures."""

from __future__ import annotations

from qerl.report.read import Run


def latest_warnings(run: Run) -> list[tuple[str, str]]:
    """(steps, text) of each kind of warning, in the order in which the kinds first came."""
    by_kind: dict[str, list[dict]] = {}
    for row in run.warnings:
        by_kind.setdefault(row["kind"], []).append(row)
    return [(", ".join(str(row["step"]) for row in rows), str(rows[-1]["text"])) for rows in by_kind.values()]
