"""A run's metrics over its steps and its time by phase: one figure for curves.png and a notebook, a drawing each for
the page.

No line is drawn twice, and none that is flat: a metric that does not change in three digits is a number in a table.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from qerl.report.read import Run
from qerl.report.sections import Table, phases, rounded, source_names, stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Mapping[str, str]  # label -> metric
    log: bool = False
    noise: bool = False  # also draw the noise stages and, on an axis of its own, sigma
    smooth: bool = False  # also draw the first line averaged over a tenth of the run
    first: bool = False  # says whether the run learned: the page shows it before the samples
    share: bool = False  # from 0 to 1, if its values are


PANELS = (
    Panel(
        "loss (nats per learned token)", {"trained on": "nll", "held out": "validation/loss"}, smooth=True, first=True
    ),
    Panel(
        "KL to the teacher (nats per token)",
        {"forward": "kl_to_teacher/forward", "reverse": "kl_to_teacher/reverse"},
        log=True,
        smooth=True,
        first=True,
    ),
    Panel("reward", {"trained on": "reward", "all sampled": "sampled/reward"}, smooth=True, first=True, share=True),
    Panel(
        "accuracy",
        {"trained on": "rewards/accuracy", "all sampled": "sampled/accuracy"},
        smooth=True,
        first=True,
        share=True,
    ),
    Panel(
        "validation accuracy, with its 95% interval",
        {
            "accuracy": "validation/accuracy",
            "lower bound": "validation/accuracy_low",
            "upper bound": "validation/accuracy_high",
        },
        first=True,
        share=True,
    ),
    Panel(
        "entropy (nats per token) and sigma, by stage",
        {"policy": "entropy", "as sampled": "sampling/entropy"},
        noise=True,
    ),
    Panel("KL from the policy that the run started with (nats per token)", {"kl": "kl"}),
    Panel("gradient norm before clipping", {"gradient norm": "grad_norm"}, log=True),
    Panel("KL of the updates on a rollout (nats per token)", {"KL": "update_kl"}),
    Panel("clipped ratios (shares of tokens)", {"below": "clip/low_share", "above": "clip/high_share"}),
    Panel("mismatch_kl, sampling against trainer (nats)", {"mismatch_kl": "mismatch_kl"}, log=True),
    Panel(
        "importance weights (shares of tokens)",
        {
            "effective sample size": "correction/ess",
            "capped": "correction/capped_share",
            "masked": "correction/masked_share",
        },
    ),
    Panel(
        "tokens per completion", {"mean": "completions/mean_tokens", "longest": "completions/max_tokens"}, first=True
    ),
    Panel(
        "truncated, no answer (shares of completions)",
        {"truncated": "completions/truncated_share", "no answer": "grades/no_answer_share"},
    ),
    Panel(
        "groups (shares)",
        {
            "of one reward": "groups/zero_variance_share",
            "all right": "groups/all_right_share",
            "all wrong": "groups/all_wrong_share",
        },
    ),
    Panel(
        "dynamic sampling (groups)",
        {
            "sampled": "dynamic_sampling/sampled_groups",
            "discarded": "dynamic_sampling/discarded_groups",
            "without a signal, trained on": "dynamic_sampling/filled_groups",
        },
    ),
    Panel("carried over (steps)", {"mean age of tokens": "carry_over/mean_age", "largest": "carry_over/max_age"}),
    Panel("seconds per step", {"seconds per step": "time/step_s"}),
    Panel(
        "GPU memory (GiB)",
        {
            "card, rollout": "memory/rollout_card_gib",
            "card, training": "memory/train_card_gib",
            "micro-batch": "memory/train_gib",
            "micro-batch as planned": "memory/train_planned_gib",
        },
    ),
)

STYLES = ("-", "--", ":", "-.")  # of the lines of a panel, where colours tell runs apart
SMALL = 0.25  # a share that stays below it would be a flat line on an axis from 0 to 1
SOURCE_PANELS = (
    ("reward by source", "sources/{}/reward"),
    ("validation accuracy by source", "validation/sources/{}/accuracy"),
)


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels with the lines that change and that no panel before has; panels without a line are left out.

    If there are several rewards, one panel shows each by its name.
    """
    found: list[Panel] = []
    drawn: list[tuple[Any, int]] = []  # the points of a line, and the number of its panel
    for panel in _candidates(runs):
        lines, same = {}, None
        for label, key in panel.lines.items():
            points = [_points(run, key) for run in runs]
            if all(map(_is_flat, points)):
                continue
            if (place := next((number for other, number in drawn if other == points), None)) is None:
                drawn.append((points, len(found)))
                lines[label] = key
            elif same is None:
                same = place
        if lines:
            found.append(replace(panel, lines=lines))
        elif same is not None:
            found[same] = replace(found[same], title=f"{found[same].title} ({panel.title} is the same)")
    return found


def constant_table(runs: Sequence[Run]) -> Table | None:
    """The metrics that were logged and did not change in any run, with their values; None if there are none. Those of
    time and memory are left out: they have tables of their own."""
    cells = []
    for panel in _candidates(runs):
        for label, key in panel.lines.items():
            points = [_points(run, key) for run in runs]
            if not any(points) or not all(map(_is_flat, points)) or key.startswith(("time/", "memory/")):
                continue
            name = panel.title if len(panel.lines) == 1 else f"{panel.title}: {label}"
            row = [name, *(rounded(each[-1][1]) if each else "" for each in points)]
            cells += [row] if row not in cells else []
    heading = ["constant", *(run.name for run in runs)] if len(runs) > 1 else ["constant", "value"]
    return (heading, cells) if cells else None


def _candidates(runs: Sequence[Run]) -> list[Panel]:
    names = sorted({key for run in runs for row in run.rows for key in row if key.startswith("rewards/")})
    found = list(PANELS)
    for number, (title, what) in enumerate(SOURCE_PANELS):
        lines = {name: what.format(name) for name in source_names([row for run in runs for row in run.rows])}
        found.insert(1 + number, Panel(title, lines, share=True))
    if len(names) > 1:
        after = next(number for number, panel in enumerate(found, start=1) if panel.title == "accuracy")
        found.insert(after, Panel("rewards by name", {name.removeprefix("rewards/"): name for name in names}))
    return found


def _is_flat(points: Sequence[tuple[int, float]]) -> bool:
    return len({rounded(value) for _, value in points}) < 2


def curves(runs: Sequence[Run], chosen: Sequence[Panel] | None = None) -> Figure:
    """A figure of the `chosen` panels, or of every panel and the time by phase, of one run or of several."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    found = panels(runs) if chosen is None else list(chosen)
    timed = [run for run in runs if phases(run.rows)] if chosen is None else []
    count = len(found) + bool(timed)
    columns = min(4 if count % 4 in (0, 3) else 3, max(1, count))
    height = max(1, -(-count // columns))
    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=(4.3 * columns, 3.1 * height + 0.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(height, columns, squeeze=False).flatten()
        for axis, panel in zip(axes, found, strict=False):
            draw_panel(axis, panel, runs)
        if timed:
            draw_time(axes[len(found)], timed)
        if len(runs) > 1:
            named = [Line2D([], [], color=f"C{index}", label=run.name, lw=2.2) for index, run in enumerate(runs)]
            _legend(figure, handles=named, loc="outside upper center", ncols=min(4, len(runs)))
        else:
            figure.suptitle(runs[0].name, parse_math=False)
    for axis in axes[count:]:
        axis.set_axis_off()
    if not count:
        axes[0].text(0.5, 0.5, "no metric changed", ha="center")
    return figure


def draw_panel(axis: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    """Draw one panel. With several runs, each has its own colour, and their lines differ in style."""
    from matplotlib.lines import Line2D

    several, values = len(runs) > 1, []
    for index, run in enumerate(runs):
        for line, key in enumerate(panel.lines.values()):
            points = [(step, value) for step, value in _points(run, key) if value > 0 or not panel.log]
            if not points:
                continue
            values += [value for _, value in points]
            colour, smoothed = f"C{index if several else line}", panel.smooth and line == 0
            style = STYLES[line % 4] if several else "-"
            axis.plot(*zip(*points, strict=True), style, color=colour, alpha=0.45 if smoothed else 1, lw=1.2)
            if smoothed:
                axis.plot(*zip(*_smooth(points), strict=True), color=colour, lw=2.2)
    if panel.noise:
        _draw_noise(axis, runs)
    if panel.log and values:
        axis.set_yscale("log")
    if panel.share and values and min(values) >= 0 and SMALL <= max(values) <= 1:
        axis.set_ylim(-0.02, 1.02)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel("step", fontsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    if len(panel.lines) > 1:
        looks = [("0.5", STYLES[line % 4]) if several else (f"C{line}", "-") for line in range(len(panel.lines))]
        named = zip(looks, panel.lines, strict=True)
        _legend(axis, handles=[Line2D([], [], color=color, ls=ls, label=label) for (color, ls), label in named])


def _legend(where: Axes | Figure, **how: Any) -> None:
    """A legend whose names may contain dollar signs."""
    for text in where.legend(fontsize=8, **how).get_texts():
        text.set_parse_math(False)


def draw_time(axis: Axes, runs: Sequence[Run]) -> None:
    """Draw where the time of each run went as one bar, stacked by phase; shares stand in the legend of a single run."""
    import matplotlib.ticker

    columns = [{phase.name: phase for phase in phases(run.rows)} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    starts = [0.0] * len(runs)
    for index, name in enumerate(names):
        widths = [column[name].share if name in column else 0.0 for column in columns]
        label = f"{name} {widths[0]:.0%}" if len(runs) == 1 else name
        axis.barh(range(len(runs)), widths, left=starts, color=f"C{index}", label=label, height=0.6)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axis.set_yticks([])
    for index, run in enumerate(runs if len(runs) > 1 else []):
        axis.text(0, index - 0.34, run.name, fontsize=8, va="bottom", parse_math=False)
    axis.set_ylim(len(runs) - 0.5, -0.7)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    axis.set_title("time by phase", fontsize=10)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)


def _draw_noise(axis: Axes, runs: Sequence[Run]) -> None:
    """Draw sigma on a second, logarithmic axis (a stage without noise is a gap); mark the stages of the first run."""
    import matplotlib.ticker

    noisy = [(run, [point for point in _points(run, "noise/sigma") if point[1] > 0]) for run in runs]
    if not any(points for _, points in noisy):
        return
    second = axis.twinx()
    for index, (_, points) in enumerate(noisy):
        if points:
            colour = f"C{index}" if len(runs) > 1 else "0.55"
            second.step(*zip(*points, strict=True), where="mid", color=colour, lw=1.2, ls="-.", alpha=0.8)
    second.set_yscale("log")
    second.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    second.set_ylabel("sigma (dash-dotted)", fontsize=8)
    second.tick_params(labelsize=8)
    for stage in stages(runs[0].rows)[1:]:
        axis.axvline(stage[0]["step"] - 0.5, color="0.55", lw=0.7, ls=":")


def _points(run: Run, key: str) -> list[tuple[int, float]]:
    rows = run.validations if key.startswith("validation/") else run.rows  # one may stand before the first step
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """For each point, the mean over the tenth of the run that ends there."""
    width = max(1, len(points) // 10)
    windows = [points[max(0, i + 1 - width) : i + 1] for i in range(len(points))]
    return [(window[-1][0], sum(value for _, value in window) / len(window)) for window in windows]


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


def pictures(runs: Sequence[Run]) -> tuple[list[Picture], list[Picture]]:
    """Each panel as SVG: those that say whether the run learned, and the others, with the time by phase.

    A run is told by its colour, `DRAWN` in the order of `runs`.
    """
    found, timed = panels(runs), [run for run in runs if phases(run.rows)]
    first, later = ([panel for panel in found if panel.first is wanted] for wanted in (True, False))
    time = [_picture("time by phase", lambda axis: draw_time(axis, timed))] if timed else []
    drawn = [[_picture(each.title, partial(draw_panel, panel=each, runs=runs)) for each in of] for of in (first, later)]
    return drawn[0], drawn[1] + time


def _picture(title: str, draw: Callable[[Axes], None]) -> Picture:
    """The dark one is the light one with other colours. Tables of the page have its numbers."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=(4.0, 2.8), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots())
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    light = dark = out.getvalue().decode("utf-8")
    for bright, dim in (TEXT, LINES, *DRAWN):
        dark = dark.replace(bright, dim)
    encoded = (base64.b64encode(svg.encode("utf-8", errors="replace")).decode("ascii") for svg in (light, dark))
    return Picture(*(f"data:image/svg+xml;base64,{text}" for text in encoded), title)


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
