"""What follows from a run's validations: the best one, and whether the run ends. Pure functions of metrics.jsonl.

Nothing else is kept, so that a resumed run knows what an uninterrupted one knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.config.validation import ValidationConfig

Rows = Sequence[Mapping[str, Any]]

LOSS = "loss"
SHARES = ("accuracy", "accuracy_low", "accuracy_high")


@dataclass(frozen=True)
class Best:
    """The step with the best validation by `metric`, the first of equals, and its value."""

    step: int
    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {shown(self.metric, self.value)} after step {self.step}"


def validations(rows: Rows) -> list[Mapping[str, Any]]:
    """The rows of metrics.jsonl that hold a validation."""
    return [row for row in rows if any(row.get(f"validation/{name}") is not None for name in ("reward", LOSS))]


def decisive(rows: Rows, config: ValidationConfig) -> tuple[str, Callable[[float], float]]:
    """The metric that decides, and its value as a number that is the better the higher it is.

    A run on given conversations measures their loss alone.
    """
    if any(row.get(f"validation/{LOSS}") is not None for row in rows):
        return LOSS, lambda value: -value
    return config.metric, lambda value: value


def best_of(rows: Rows, config: ValidationConfig) -> Best | None:
    """The best validation after a step; None if there is none. The one before the first step has no checkpoint."""
    metric, height = decisive(rows, config)
    found = [(row["step"], row[f"validation/{metric}"]) for row in validations(rows) if row["step"]]
    if not found:
        return None
    value = max((value for _, value in found), key=height)
    return Best(next(step for step, each in found if each == value), metric, value)


def ending(rows: Rows, config: ValidationConfig, step: int) -> str | None:
    """Why the validation after `step` ends the run, in words; None if it does not. The one before step 1 never does."""
    metric, height = decisive(rows, config)
    values = [(row["step"], row[f"validation/{metric}"]) for row in validations(rows)]
    if config.every is None or not step or not values or values[-1][0] != step:
        return None
    last = shown(metric, values[-1][1])
    heights = [height(value) for _, value in values]
    since = len(heights) - 1 - heights.index(max(heights))  # validations after the first of the best
    if config.stop_after is not None and since >= config.stop_after:
        return (
            f"validation {metric} ({last}) has not improved in {since} validations (validation.stop_after "
            f"{config.stop_after})"
        )
    return None


def shown(metric: str, value: float) -> str:
    return f"{value:.1%}" if metric in SHARES else f"{value:.4f}" if metric == LOSS else f"{value:.3f}"


def sentence(row: Mapping[str, Any]) -> str:
    when = f"after step {row['step']}" if row["step"] else "before the first step"
    if (loss := row.get(f"validation/{LOSS}")) is not None:
        return f"validation {when}: loss {loss:.4f}"
    found = [shown(name, row[f"validation/{name}"]) for name in SHARES if row.get(f"validation/{name}") is not None]
    accuracy = f"accuracy {found[0]} ({found[1]} to {found[2]}), " if len(found) == len(SHARES) else ""
    return (
        f"validation {when}: {accuracy}reward {row['validation/reward']:.3f}, "
        f"{row['validation/mean_tokens']:.0f} tokens, {row['validation/truncated_share']:.1%} truncated"
    )
