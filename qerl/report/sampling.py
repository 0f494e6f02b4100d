"""What dynamic sampling did in a run and what it cost, summed over all steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "dynamic_sampling/"
SUMMED = ("extra_rollouts", "sampled_groups", "discarded_groups", "discarded_tokens", "filled_groups")


def sampling_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Sums over the steps that sampled dynamically, by metric name without the prefix; None if there were none."""
    steps = [row for row in rows if row.get(PREFIX + "sampled_groups") is not None]
    if not steps:
        return None
    totals = {name: sum(row[PREFIX + name] for row in steps) for name in SUMMED}
    totals["extra_s"] = sum(row.get("time/extra_rollouts_s") or 0.0 for row in steps)
    totals["share_of_time"] = totals["extra_s"] / (sum(row.get("time/step_s") or 0.0 for row in rows) or 1.0)
    return totals


def sampling_text(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The totals in a sentence; None for a run without dynamic sampling."""
    totals = sampling_totals(rows)
    if totals is None:
        return None
    trained = totals["sampled_groups"] - totals["discarded_groups"]
    return (
        f"{trained - totals['filled_groups']:.0f} of the {trained:.0f} groups trained on had a "
        f"signal; {totals['sampled_groups']:.0f} were sampled and {totals['discarded_groups']:.0f} discarded "
        f"({totals['discarded_tokens']:,.0f} tokens), in {totals['extra_rollouts']:.0f} extra rollouts of "
        f"{totals['extra_s']:.0f} s, {totals['share_of_time']:.0%} of the run's time"
    )
