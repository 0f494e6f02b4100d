"""The picture for scripts/study/study_noise.py: reward and entropy over the steps, accuracy with its interval.

For scripts/study/study_qat.py it has `mismatch_kl` in place of the entropy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from study_arms import ARMS
from study_report import answers, estimate, finals, of_weights, present

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "bf16": "#4c72b0", "nvfp4": "#dd8452", "nvfp4_aqn": "#55a868", "nvfp4_aqn_both": "#c44e52", "nf4": "#8172b3",
    "nvfp4_aqn_x10": "#937860", "qat": "#c44e52", "no_qat": "#937860", "bf16_weights": "#4c72b0",
    "nvfp4_rounded": "#937860", "packed_in": "#c44e52", "fp8": "#55a868",
    "qat_fp8_gradients": "#55a868", "fp8_both": "#c44e52", "fp8_rollout": "#937860",
    "dense": "#4c72b0", "experts_shared": "#c44e52", "experts_per_expert": "#55a868", "experts_none": "#937860",
}  # fmt: skip
DASHES = {
    "nvfp4_aqn": (4, 2),
    "nvfp4_aqn_both": (1, 1),
    "nvfp4_rounded": (4, 2),
}  # keep curves visible that coincide with others
SMOOTH = 5  # steps of the moving mean


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the picture; a curve is the mean over the seeds at the chosen rate, its shade their range."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    whole = of_weights(results)
    for place, name in zip(axes, ("reward", "mismatch_kl" if whole else "sampling/entropy"), strict=False):
        for arm in present(results):
            _curve(place, arm, np.array([_smooth(run["steps"][name]) for run in finals(results, arm)]))
        place.set_xlabel("step")
    _accuracies(axes[2], results)
    if whole:
        axes[1].set_yscale("log")
    second = "mismatch_kl of sampler and trainer (nats)" if whole else "entropy of the sampler (nats per token)"
    for place, title in zip(axes, ("reward", second, "unseen problems"), strict=True):
        place.set_title(title, fontsize=10)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _curve(place: Any, arm: str, curves: np.ndarray) -> None:
    steps = np.arange(curves.shape[1]) + SMOOTH
    style = {"color": COLOURS[arm], "label": ARMS[arm].title, "dashes": DASHES.get(arm, (None, None))}
    place.plot(steps, curves.mean(0), **style)
    place.fill_between(steps, curves.min(0), curves.max(0), color=COLOURS[arm], alpha=0.1, linewidth=0)


def _accuracies(place: Any, results: dict[str, Any]) -> None:
    """Draw a point for each seed, and the mean with its interval."""
    arms = present(results)
    for index, arm in enumerate(arms):
        right = answers(finals(results, arm))
        value, half = estimate(right)
        place.scatter([index] * len(right), right.mean(1), s=14, color=COLOURS[arm], alpha=0.6)
        place.errorbar(index, value, yerr=None if np.isnan(half) else half, color=COLOURS[arm], capsize=4, marker="_")
    place.set_xticks(range(len(arms)), [arm.replace("_", "\n") for arm in arms], fontsize=7)


def _smooth(values: list[float]) -> np.ndarray:
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, mode="valid")
