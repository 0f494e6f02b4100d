"""Drawings for the page: SVG in data URIs, one for light and one for dark screens."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl.report.curves import Panel, draw_panel, draw_time, panels
from qerl.report.evaluations import draw_evaluations
from qerl.report.read import Evaluation, Run
from qerl.report.summary import phases, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours for light and for dark screens: of text, of axes and grid, and of the curves.
TEXT, LINES = ("#1f2328", "#e6e8eb"), ("#c8ccd1", "#4a5058")
DRAWN = (
    ("#1a6fb5", "#6db8f2"),
    ("#c8590b", "#ffa657"),
    ("#2c8a3c", "#7fd88f"),
    ("#b3261e", "#ff8f87"),
    ("#7549b1", "#c2a2f5"),
    ("#8a6d00", "#e0c341"),
    ("#0b7a75", "#5fd4cd"),
    ("#6e7781", "#9aa4af"),
)


@dataclass(frozen=True)
class Picture:
    """One drawing for both kinds of screen; `alt` describes it in words."""

    light: str
    dark: str
    alt: str


def curve_pictures(runs: Sequence[Run]) -> list[Picture]:
    """A picture of each panel that has something to draw."""
    return [_panel_picture(panel, runs) for panel in panels(runs)]


def time_picture(runs: Sequence[Run]) -> Picture | None:
    """A picture of where the time went, by phase; None if no run logged times."""
    timed = [run for run in runs if phases(run.rows)]
    if not timed:
        return None
    texts = [f"{run.name}: {phase.name} {phase.share:.0%}" for run in timed for phase in phases(run.rows)]
    light = _draw(lambda axis: draw_time(axis, timed), 1.7 + 0.35 * (len(timed) - 1), 6.4)
    return _picture(light, "time by phase: " + "; ".join(texts))


def evaluation_picture(results: Sequence[Evaluation]) -> Picture | None:
    """A picture of the accuracies with their intervals; None if no result has one."""
    evaluations = [evaluation for evaluation in results if evaluation.result.get("accuracy")]
    if not evaluations:
        return None
    light = _draw(lambda axis: draw_evaluations(axis, evaluations), 0.8 + 0.3 * len(evaluations))
    values = [f"{each.result['task']} {each.name} {each.result['accuracy']['value']:.1%}" for each in evaluations]
    return _picture(light, "accuracy: " + ", ".join(values))


def _panel_picture(panel: Panel, runs: Sequence[Run]) -> Picture:
    light = _draw(lambda axis: draw_panel(axis, panel, runs), 2.9)
    return _picture(light, f"{panel.title}: " + "; ".join(_ends(panel, runs)))


def _picture(light: str, alt: str) -> Picture:
    """A picture from its light drawing: the dark one is the same with other colours."""
    dark = light
    for bright, dim in (TEXT, LINES, *DRAWN):
        dark = dark.replace(bright, dim)
    return Picture(_data_uri(light), _data_uri(dark), alt)


def _ends(panel: Panel, runs: Sequence[Run]) -> list[str]:
    """The first and the last value of each line, in words."""
    found = []
    for run in runs:
        for label, key in panel.lines:
            points = [(row["step"], row[key]) for row in run.rows if row.get(key) is not None]
            if points:
                (first, start), (last, end) = points[0], points[-1]
                found.append(f"{run.name} {label} {rounded(start)} at step {first}, {rounded(end)} at step {last}")
    return found


def _draw(draw: Callable[[Axes], None], height: float, width: float = 4.6) -> str:
    """A drawing as SVG, in the colours for light screens."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        out = io.BytesIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue().decode("utf-8")


def _style() -> dict[str, Any]:
    from cycler import cycler

    return {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT[0]),
        "axes.edgecolor": LINES[0],
        "grid.color": LINES[0],
        "legend.facecolor": "none",
        "legend.edgecolor": LINES[0],
        "axes.prop_cycle": cycler(color=[light for light, _ in DRAWN]),
        "svg.fonttype": "none",  # keeps text as text, which takes half the bytes and uses the reader's font
        "font.family": "sans-serif",
        "svg.hashsalt": "qerl",  # makes the same run give the same bytes
    }


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8", errors="replace")).decode("ascii")
