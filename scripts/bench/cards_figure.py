#!/usr/bin/env python3
"""Draw seconds per step over the number of cards, from the files of batch `ranks4` (scripts/bench/on_card.sh).

    python3 scripts/bench/cards_figure.py benchmarks/several-gpus/four-cards docs/images/cards-7b.png

A bar is the mean of the steps after the first: the rollout, training, and the rest. The dashed line in it is one card's
seconds divided by the number of cards.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CARDS = (1, 2, 4)
PARTS = {"rollout": "time/rollout_s", "training": "time/train_s"}
COLOURS = {"rollout": "#4c72b0", "training": "#dd8452", "rest": "#b0b0b0"}
TRL = "TRL 1.16, tuned"


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, picture = map(Path, sys.argv[1:])
    draw(
        {
            "512 tokens each": {n: seconds(folder / f"step-7b-cards{n}.json") for n in CARDS},
            "geometric lengths, mean 300, at most 1024": {
                n: seconds(path) for n in CARDS if (path := folder / f"step-7b-mixed-cards{n}.json").exists()
            },
        },
        {n: peer(path) for n in CARDS if (path := folder / f"step-7b-trl-cards{n}.json").exists()},
        picture,
    )


def seconds(path: Path) -> dict[str, float]:
    """The mean of each part over the steps after the first."""
    steps = json.loads(path.read_text(encoding="utf-8"))["steps"][1:]
    parts = {name: mean(step[key] for step in steps) for name, key in PARTS.items()}
    return {**parts, "rest": mean(step["time/step_s"] for step in steps) - sum(parts.values())}


def peer(path: Path) -> float:
    """TRL's seconds per step after the first."""
    return mean(step["step_time"] for step in json.loads(path.read_text(encoding="utf-8"))["steps"][1:])


def draw(ours: dict[str, dict[int, dict[str, float]]], trl: dict[int, float], picture: Path) -> None:
    """One plot for each kind of lengths; TRL's seconds are of the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, len(ours), figsize=(8.4, 3.2), sharey=True, layout="constrained")
    for place, (title, by_cards) in zip(places, ours.items(), strict=True):
        bars(place, list(by_cards.values()))
        ideal = [sum(by_cards[1].values()) / number for number in by_cards]
        place.hlines(ideal, [at - 0.38 for at in range(len(ideal))], [at + 0.38 for at in range(len(ideal))], "k", "--")
        place.set_xticks(range(len(by_cards)), [f"{n} card{'s' * (n > 1)}" for n in by_cards])
        place.set_title(title, fontsize=10)
        place.spines[["top", "right"]].set_visible(False)
    for number, height in trl.items():
        at = [*next(iter(ours.values()))].index(number)
        places[0].plot(at, height, "D", color="#c44e52", label=TRL)
        places[0].annotate(f"{height:.2f}", (at, height), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    places[0].set_ylabel("seconds per step")
    places[0].legend(fontsize=8)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def bars(place: Axes, columns: Sequence[dict[str, float]]) -> None:
    """A stacked bar for each number of cards, with its sum written above it."""
    for at, parts in enumerate(columns):
        bottom = 0.0
        for name, height in parts.items():
            place.bar(at, height, 0.6, bottom, color=COLOURS[name], label=None if at else name)
            bottom += height
        place.annotate(f"{bottom:.2f}", (at, bottom), (0, 3), textcoords="offset points", ha="center", fontsize=8)


if __name__ == "__main__":
    main()
