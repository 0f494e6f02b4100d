"""Tables and pictures of scripts/study_noise.py from its results; needs no GPU.

Accuracy is greedy, on rows that neither training nor the choice of the rate has seen. The interval of an arm is over
its seeds (Student's t, 95%). Two arms are compared on the same questions: the difference of each question's mean over
the seeds, with a bootstrap over questions and seeds (10,000 draws), so that both kinds of chance are in the interval.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from study_arms import ARMS

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}  # by degrees of freedom
DRAWS = 10_000
COLOURS = {"bf16": "#4c72b0", "nvfp4": "#dd8452", "nvfp4_aqn": "#55a868", "nvfp4_aqn_both": "#c44e52", "nf4": "#8172b3"}
SMOOTH = 5  # steps of a moving mean in the curves


def write_report(results: Path, images: Path) -> str:
    """Draw docs/images/study-noise.png and return the tables as markdown."""
    found = json.loads(results.read_text(encoding="utf-8"))
    images.mkdir(parents=True, exist_ok=True)
    draw(found, images / "study-noise.png")
    return tables(found)


def finals(results: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """The arm's reported runs, by seed: those of the rate with the most right validation answers."""
    runs = [row for row in results["runs"].values() if row["arm"] == arm and row["phase"] == "final"]
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for row in sorted(runs, key=lambda row: (row["rate"], row["seed"])):
        by_rate.setdefault(row["rate"], []).append(row)
    most = max((len(rows) for rows in by_rate.values()), default=0)
    whole = [rows for rows in by_rate.values() if len(rows) == most]
    return max(whole, key=lambda rows: sum(row["validation"].count("1") for row in rows), default=[])


def accuracies(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [row["test"].count("1") / len(row["test"]) for row in runs]


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95% interval of a mean over seeds; None for a single one."""
    if len(values) < 2:
        return None
    return T_95[len(values) - 1] * stdev(values) / len(values) ** 0.5


def compare(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Accuracy of the second arm less the first's, and the bounds of its 95% interval."""
    a, b = (np.array([[bit == "1" for bit in row["test"]] for row in runs], dtype=float) for runs in (first, second))
    rng = np.random.default_rng(0)
    differences = []
    for _ in range(DRAWS):
        questions = rng.integers(0, a.shape[1], a.shape[1])
        rows_a, rows_b = (rng.integers(0, len(x), len(x)) for x in (a, b))
        differences.append(b[rows_b][:, questions].mean() - a[rows_a][:, questions].mean())
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(b.mean() - a.mean()), float(low), float(high)


def tables(results: dict[str, Any]) -> str:
    """What each arm reached, and the arms against BF16 LoRA and against NVFP4 LoRA."""
    lines = [
        "| arm | before | after, mean of seeds (95%) | seeds | rate | reward first to last tenth | entropy | "
        "s a step | GiB |",
        "|---" * 9 + "|",
    ]
    arms = [arm for arm in ARMS if finals(results, arm)]
    lines += [_row(results, arm) for arm in arms]
    lines += ["", "| against | difference in accuracy (95%) | verdict |", "|---|---|---|"]
    for reference in ("bf16", "nvfp4"):
        for arm in arms:
            if reference in arms and arm != reference and not (reference == "nvfp4" and arm == "bf16"):
                lines.append(_comparison(results, reference, arm))
    if results["failed"]:
        lines += ["", f"Failed: {', '.join(results['failed'])}."]
    return "\n".join(lines)


def _row(results: dict[str, Any], arm: str) -> str:
    runs = finals(results, arm)
    values, half = accuracies(runs), interval(accuracies(runs))
    base = next(
        (r for r in results["runs"].values() if r["rate"] is None and ARMS[r["arm"]].base == ARMS[arm].base), None
    )
    before = f"{accuracies([base])[0]:.1%}" if base else ""
    after = f"{mean(values):.1%}" + (f" ± {100 * half:.1f}" if half is not None else "")
    each = " / ".join(f"{value:.1%}" for value in values)
    first, last = (mean(_tenth(run, "reward", end) for run in runs) for end in (False, True))
    entropy = mean(_tenth(run, "entropy", True) for run in runs)
    seconds = mean(_tenth(run, "time/step_s", True) for run in runs)
    memory = max(value for run in runs for value in run["steps"].get("memory/peak_gib", [0.0]) if value is not None)
    cells = [
        ARMS[arm].title,
        before,
        after,
        each,
        f"{runs[0]['rate']:g}",
        f"{first:.2f} to {last:.2f}",
        f"{entropy:.2f}",
    ]
    return f"| {' | '.join([*cells, f'{seconds:.1f}', f'{memory:.2f}'])} |"


def _comparison(results: dict[str, Any], reference: str, arm: str) -> str:
    difference, low, high = compare(finals(results, reference), finals(results, arm))
    verdict = "better" if low > 0 else "worse" if high < 0 else "cannot tell"
    words = f"{ARMS[arm].title} against {ARMS[reference].title}"
    return f"| {words} | {100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) | {verdict} |"


def _tenth(run: dict[str, Any], name: str, last: bool) -> float:
    values = [value for value in run["steps"].get(name, []) if value is not None] or [float("nan")]
    count = max(1, len(values) // 10)
    return mean(values[-count:] if last else values[:count])


def draw(results: dict[str, Any], path: Path) -> None:
    """Reward, entropy and sigma over the steps, mean and range over the seeds; accuracy with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = [arm for arm in ARMS if finals(results, arm)]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for arm in arms:
        for place, name in zip(axes, ("reward", "entropy"), strict=False):
            curves = np.array([_smooth(run["steps"][name]) for run in finals(results, arm)])
            steps = np.arange(curves.shape[1]) + SMOOTH
            place.plot(steps, curves.mean(0), color=COLOURS[arm], label=ARMS[arm].title)
            place.fill_between(steps, curves.min(0), curves.max(0), color=COLOURS[arm], alpha=0.15, linewidth=0)
    for place, title in zip(axes, ("reward", "entropy (nats a token)", "accuracy on unseen problems"), strict=True):
        place.set_title(title, fontsize=10)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlabel("step")
    axes[1].set_xlabel("step")
    for index, arm in enumerate(arms):
        values = accuracies(finals(results, arm))
        axes[2].scatter([index] * len(values), values, s=14, color=COLOURS[arm], alpha=0.6)
        axes[2].errorbar(index, mean(values), yerr=interval(values) or 0, color=COLOURS[arm], capsize=4, marker="_")
    axes[2].set_xticks(range(len(arms)), [ARMS[arm].title.replace(" LoRA", "\nLoRA", 1) for arm in arms], fontsize=6)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _smooth(values: Sequence[float | None]) -> np.ndarray:
    filled = np.array([np.nan if value is None else value for value in values], dtype=float)
    return np.convolve(filled, np.ones(SMOOTH) / SMOOTH, mode="valid")
