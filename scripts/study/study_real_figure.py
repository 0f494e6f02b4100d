"""The picture of scripts/study/study_real.py: reward over the steps, and accuracy after training, by arm."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from study_real_arms import ARMS, BF16
from study_real_report import accuracy, before, best, half_width, present, rewards

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SMOOTH = 5  # steps of the moving mean


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the picture; a curve is the mean over the seeds at the arm's best rate, a dot is one seed."""
    arms = present(results)
    colours = dict(zip(arms, cycle(plt.get_cmap("tab20").colors), strict=False))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, max(3.6, 0.32 * len(arms) + 1)), layout="constrained", width_ratios=(1, 1.2)
    )
    for arm in arms:
        curves = np.array([np.convolve(rewards(row), np.ones(SMOOTH) / SMOOTH, "valid") for row in best(results, arm)])
        steps = np.arange(curves.shape[1]) + SMOOTH
        left.plot(steps, curves.mean(0), color=colours[arm], label=ARMS[arm].title, linewidth=1.4)
    left.set_title("share of right completions while training", fontsize=10)
    left.set_xlabel("step")
    dots(right, results, arms, colours)
    for place in (left, right):
        place.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def dots(place: Any, results: dict[str, Any], arms: list[str], colours: dict[str, Any]) -> None:
    """Accuracy by arm: a dot for each seed, the mean with its interval, and a hollow dot before training."""
    for height, arm in enumerate(reversed(arms)):
        values = [accuracy(row) for row in best(results, arm)]
        place.scatter(values, [height] * len(values), s=14, color=colours[arm], alpha=0.6)
        half = half_width(values)
        place.errorbar(
            [np.mean(values)], [height], xerr=[0 if half != half else half], fmt="|", color="black", capsize=3
        )
        if (was := before(results, arm)) is not None:
            place.scatter([was], [height], s=18, facecolors="none", edgecolors=colours[arm])
    if BF16 in arms:
        place.axvline(
            np.mean([accuracy(row) for row in best(results, BF16)]), color="grey", linewidth=0.8, linestyle=":"
        )
    place.set_yticks(range(len(arms)), [ARMS[arm].title for arm in reversed(arms)], fontsize=7, fontweight="bold")
    for arm, label in zip(reversed(arms), place.get_yticklabels(), strict=True):  # the key to the curves as well
        label.set_color(colours[arm])
    place.set_title("unseen problems, % right: before (hollow), after", fontsize=10)
    place.set_xlim(0, 80)
