"""docs/images/before-after.png: the reward while the quickstart trains, between its accuracy before and after."""

from __future__ import annotations

import json
from pathlib import Path


def draw(run_dir: Path, before: Path, after: Path, picture: Path) -> None:
    """`before` and `after` are folders of `qerl eval`; each point of the curve is the mean reward of one step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    figure, axes = plt.subplots(figsize=(8.5, 3.2), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["reward"] for row in rows], "C0-", lw=1.5, label="reward in training")
    last = rows[-1]["step"]
    for folder, name, colour in ((before, "before", "C1"), (after, "after", "C2")):
        value = json.loads((folder / "result.json").read_text(encoding="utf-8"))["accuracy"]["value"]
        axes.axhline(value, color=colour, ls="--", lw=1.5)
        place = (last, value + 0.02)
        axes.annotate(f"accuracy {name}: {value:.1%}", place, ha="right", va="bottom", color=colour, weight="bold")
    axes.set(xlabel="training step", ylim=(0, 1.1), xlim=(0.5, last + 0.5), yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)
    plt.close(figure)
