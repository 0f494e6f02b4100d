"""A run's metrics over its steps and its time by phase: one figure, for curves.png, the page and a notebook.

No line is drawn twice, and none that is flat: a metric that does not change in three digits is a number in a table.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qerl.report.read import Row, Run
from qerl.report.sections import Table, phases, rounded, source_names, stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One drawing."""

    title: str
    lines: Mapping[str, str]  # label -> metric
    log: bool = False
    noise: bool = False  # also draw the noise stages and, on an axis of its own, sigma
    smooth: bool = False  # also draw the first line averaged over a tenth of the run


PANELS = (
    Panel("loss (nats per learned token)", {"trained on": "nll", "held out": "validation/loss"}, smooth=True),
    Panel(
        "KL to the teacher (nats per token)",
        {"forward": "kl_to_teacher/forward", "reverse": "kl_to_teacher/reverse"},
        log=True,
        smooth=True,
    ),
    Panel("reward", {"trained on": "reward", "all sampled": "sampled/reward"}, smooth=True),
    Panel("accuracy", {"trained on": "rewards/accuracy", "all sampled": "sampled/accuracy"}, smooth=True),
    Panel(
        "validation accuracy, with its 95% interval",
        {
            "accuracy": "validation/accuracy",
            "lower bound": "validation/accuracy_low",
            "upper bound": "validation/accuracy_high",
        },
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
    Panel("tokens per completion", {"mean": "completions/mean_tokens", "longest": "completions/max_tokens"}),
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
            points = [_points(run.rows, key) for run in runs]
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
            points = [_points(run.rows, key) for run in runs]
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
        found.insert(1 + number, Panel(title, lines))
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

    found = panels(runs) if chosen is None else list(chosen)
    timed = [run for run in runs if phases(run.rows)] if chosen is None else []
    count = len(found) + bool(timed)
    columns = min(4 if count % 4 in (0, 3) else 3, max(1, count))
    height = max(1, -(-count // columns))
    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=(4.3 * columns, 3.1 * height + 0.4), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(", ".join(run.name for run in runs), parse_math=False)
        axes = figure.subplots(height, columns, squeeze=False).flatten()
        for axis, panel in zip(axes, found, strict=False):
            draw_panel(axis, panel, runs)
        if timed:
            draw_time(axes[len(found)], timed)
    for axis in axes[count:]:
        axis.set_axis_off()
    if not count:
        axes[0].text(0.5, 0.5, "no metric changed", ha="center")
    return figure


def draw_panel(axis: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    """Draw one panel. With several runs, each has its own colour, and their lines differ in style."""
    for index, run in enumerate(runs):
        for line, (label, key) in enumerate(panel.lines.items()):
            points = _points(run.rows, key)
            if not points:
                continue
            colour = f"C{index if len(runs) > 1 else line}"
            style = ("-", "--", ":", "-.")[line % 4] if len(runs) > 1 else "-"
            name = " ".join([run.name] * (len(runs) > 1) + [label] * (len(panel.lines) > 1))
            smoothed = panel.smooth and line == 0
            axis.plot(
                *zip(*points, strict=True), style, color=colour, label=name, alpha=0.45 if smoothed else 1, lw=1.2
            )
            if smoothed:
                axis.plot(*zip(*_smooth(points), strict=True), color=colour, lw=2.2)
    if panel.noise:
        _draw_noise(axis, runs)
    if panel.log and _positive(panel, runs):
        axis.set_yscale("log")
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel("step", fontsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    if len(axis.get_legend_handles_labels()[1]) > (0 if len(runs) > 1 else 1):
        for text in axis.legend(fontsize=8).get_texts():
            text.set_parse_math(False)  # the name of a run may contain dollar signs


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
    named = runs if len(runs) > 1 else []
    axis.set_yticks(range(len(named)), [run.name for run in named], parse_math=False)
    axis.set_ylim(len(runs) - 0.5, -0.5)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    axis.set_title("time by phase", fontsize=10)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def _draw_noise(axis: Axes, runs: Sequence[Run]) -> None:
    """Draw sigma on a second, logarithmic axis (a stage without noise is a gap); mark the stages of the first run."""
    import matplotlib.ticker

    noisy = [(run, [point for point in _points(run.rows, "noise/sigma") if point[1] > 0]) for run in runs]
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


def _points(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _positive(panel: Panel, runs: Sequence[Run]) -> bool:
    return any(value > 0 for run in runs for key in panel.lines.values() for _, value in _points(run.rows, key))


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


def curve_picture(runs: Sequence[Run]) -> Picture:
    """The figure as SVG: the dark one is the light one with other colours. Tables of the page have its numbers."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(_style()):
        curves(runs).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    light = dark = out.getvalue().decode("utf-8")
    for bright, dim in (TEXT, LINES, *DRAWN):
        dark = dark.replace(bright, dim)
    encoded = (base64.b64encode(svg.encode("utf-8", errors="replace")).decode("ascii") for svg in (light, dark))
    titles = "; ".join(["curves", *(panel.title for panel in panels(runs))])
    return Picture(*(f"data:image/svg+xml;base64,{text}" for text in encoded), titles)


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
