"""Evaluations in the report: a table, a drawing of accuracies with their intervals, completions before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from qerl.report.read import Evaluation, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAIRS_SHOWN = 3


class Pair(NamedTuple):
    """Two completions of the same question."""

    before: Row
    after: Row


def evaluation_cells(evaluation: Evaluation) -> dict[str, str]:
    """One row of the table, by heading; values that the result does not have are left out."""
    result = evaluation.result
    cells = {"evaluation": evaluation.name, "task": str(result["task"])}
    if result.get("accuracy"):  # the result of another suite may have other numbers instead
        cells["accuracy"] = f"{result['accuracy']['value']:.1%}"
        cells["95% interval"] = _interval(result["accuracy"])
    cells |= _suite_cells(result.get("scores") or {})
    for k, value in (result.get("pass_at_k") or {}).items():
        cells[f"pass@{k}"] = f"{value['value']:.1%} ({_interval(value)})"
    for heading, key in (("truncated", "truncated_share"), ("no answer", "no_answer_share")):
        if result.get(key) is not None:
            cells[heading] = f"{result[key]:.1%}"
    if result.get("questions") is not None:
        cells["questions"] = f"{result['questions']} x {result.get('samples', 1)}"
    if result.get("completion_tokens") is not None and result.get("completions"):
        cells["tokens per completion"] = f"{result['completion_tokens'] / result['completions']:,.0f}"
    return {**cells, "model": str(result.get("model", ""))}  # last, because it is long


def evaluation_table(evaluations: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    """Heading and cells; a column that a result does not have is empty in its row."""
    rows = [evaluation_cells(evaluation) for evaluation in evaluations]
    heading = list(dict.fromkeys(name for row in rows for name in row))
    return heading, [[row.get(name, "") for name in heading] for row in rows]


def draw_evaluations(axis: Axes, evaluations: Sequence[Evaluation]) -> None:
    """Draw the accuracy of each evaluation with its interval, the first one on top."""
    for place, evaluation in enumerate(reversed(evaluations)):
        accuracy, value = evaluation.result["accuracy"], evaluation.result["accuracy"]["value"]
        # Rounding may put the value a little outside of its interval.
        away = [[max(0.0, value - accuracy["low"])], [max(0.0, accuracy["high"] - value)]]
        axis.errorbar([value], [place], xerr=away, fmt="o", color="C0", capsize=4)
    names = [f"{evaluation.result['task']} · {evaluation.name}"[-36:] for evaluation in reversed(evaluations)]
    axis.set_yticks(range(len(names)), names, parse_math=False)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_title("accuracy with its 95% interval", fontsize=10)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3, axis="x")


def pairs(before: Evaluation, after: Evaluation) -> list[Pair]:
    """Completions of the same question before and after, preferably questions that turned from wrong to right."""
    first, second = ({(row["id"], row["sample"]): row for row in each.rows} for each in (before, after))
    shared = [key for key in first if key in second]
    turned = [key for key in shared if second[key]["correct"] > first[key]["correct"]] or shared
    spread = turned[:: max(1, len(turned) // PAIRS_SHOWN)][:PAIRS_SHOWN]  # neighbours are alike in length and kind
    return [Pair(first[key], second[key]) for key in spread]


def mistakes(evaluation: Evaluation) -> list[Row]:
    """A few completions that were graded wrong, spread over the data."""
    wrong = [row for row in evaluation.rows if row.get("correct") is False]
    return wrong[:: max(1, len(wrong) // PAIRS_SHOWN)][:PAIRS_SHOWN]


def _suite_cells(scores: dict[str, dict[str, float]]) -> dict[str, str]:
    """The metrics of lighteval with their standard errors; if there are several tasks, with the task's name."""
    cells = {}
    for task, metrics in scores.items():
        for name, value in metrics.items():
            if not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr")
                spread = "" if error is None else f" ± {error:.3f}"
                cells[name if len(scores) == 1 else f"{task} {name}"] = f"{value:.3f}{spread}"
    return cells


def _interval(value: dict[str, float]) -> str:
    return f"{value['low']:.1%} to {value['high']:.1%}"
