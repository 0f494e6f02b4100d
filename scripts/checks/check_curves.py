#!/usr/bin/env python3
"""Reward curves of one recipe with one and with two ranks, over seeds: do more ranks learn the same?

    python3 scripts/checks/check_curves.py --runs runs/curves --out curves.json [--picture curves.png] [--seeds 0 1 2]
    python3 scripts/checks/check_curves.py --runs runs/curves --out curves.json --against rollout.carry_over=4

With --against both runs have one rank, and the second one has this value of the recipe. With --parallel several runs
train at the same time, those of one rank on different cards where there are several.

Sampled completions need not be equal: another number of sequences at once rounds differently, and one other token makes
another completion. So what is compared is the reward at the end (the mean over the last quarter of the steps): the
difference that the second kind of run makes on each seed, with the 95% interval of its mean, beside what seeds make.
Ranks talk by gloo on a CPU, and take a card each where there are several.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

RANKS = ("1 rank", "2 ranks")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # Student's t by the number of seeds, two-sided
LIMIT_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a new folder for the runs")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--model", help="default: the embedded model, which is quantized first")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `qerl train`")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; on cards give each a rollout.memory")
    parser.add_argument("--against", metavar="KEY=VALUE", help="compare with this value instead of with two ranks")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    from scripts.bench.provenance import command, machine
    from scripts.checks.check_faults import packed_base

    arguments.runs.mkdir(parents=True)
    arguments.model = arguments.model or packed_base(arguments.runs)
    kinds = RANKS if arguments.against is None else ("without", arguments.against)
    rewards = curves(arguments, kinds)
    found = {"command": command(), **machine(), **estimate(rewards), "rewards": rewards}
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.picture:
        draw(rewards, arguments.picture)
    print(summary(found))
    sys.exit(0 if found["within"] else 1)


def curves(arguments: argparse.Namespace, kinds: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """The reward of each step by kind and seed."""
    with ThreadPoolExecutor(arguments.parallel) as pool:
        jobs = {
            (kind, seed): pool.submit(curve, arguments, kind, seed, place)
            for kind in reversed(kinds)  # those on several cards take longest
            for place, seed in enumerate(arguments.seeds)
        }
        return {kind: {f"{seed}": jobs[kind, seed].result() for seed in arguments.seeds} for kind in kinds}


def curve(arguments: argparse.Namespace, kind: str, seed: int, place: int) -> list[float]:
    """The reward of each step of a run of that kind; with one rank it trains on the card of its place, in turns."""
    from qerl.base.devices import visible_cards
    from scripts.checks.check_faults import Ranks

    size, own = 2 if kind == RANKS[1] else 1, [kind] if kind == arguments.against else []
    cards = visible_cards()
    card = ["--gpu", f"{cards[place % len(cards)].index}"] if size == 1 and len(cards) > 1 else []
    run = arguments.runs / f"{kind.replace(' ', '-')}-seed{seed}"
    logs = Path(f"{run}-logs")
    logs.mkdir()
    given = [word for each in (f"run.seed={seed}", *arguments.set, *own) for word in ("--set", each)]
    words = [
        "--recipe",
        arguments.recipe,
        "--model",
        arguments.model,
        "--out",
        str(run),
        "--steps",
        str(arguments.steps),
        *card,
        *given,
    ]
    ranks = Ranks(argparse.Namespace(ranks=size, hosts=False), logs, words)
    codes = ranks.ended(LIMIT_S)
    if any(codes):
        sys.exit(f"the run of {kind} and seed {seed} ended with {codes}: {ranks.errors()}")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward"] for line in lines]


def last(rewards: Sequence[float]) -> float:
    """The mean over the last quarter of the steps."""
    return mean(rewards[-max(1, len(rewards) // 4) :])


def estimate(rewards: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The reward at the end by kind and seed, and the difference of the second kind with its 95% interval."""
    ends = {kind: {seed: last(curve) for seed, curve in seeds.items()} for kind, seeds in rewards.items()}
    one, two = ends.values()
    differences = [two[seed] - one[seed] for seed in one]
    spread = stdev(differences) if len(differences) > 1 else math.nan
    half = T_95.get(len(differences), 1.96) * spread / math.sqrt(len(differences))
    between = stdev(one.values()) if len(one) > 1 else math.nan
    within = abs(mean(differences)) <= max(half, 1e-12)
    return {"ends": ends, "difference": mean(differences), "half_width": half, "seeds_stdev": between, "within": within}


def summary(found: dict[str, Any]) -> str:
    """In two lines."""
    ends = ", ".join(f"{kind} {mean(seeds.values()):.4f}" for kind, seeds in found["ends"].items())
    return (
        f"reward at the end: {ends}; standard deviation between seeds {found['seeds_stdev']:.4f}\n"
        f"difference {found['difference']:+.4f} +- {found['half_width']:.4f} (95%)"
    )


def draw(rewards: dict[str, dict[str, list[float]]], path: Path) -> None:
    """The curves: a line for each run, one colour for each kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, place = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    for (kind, seeds), colour, style in zip(rewards.items(), ("#4c72b0", "#dd8452"), ("-", "--"), strict=True):
        for index, curve in enumerate(seeds.values()):
            label = None if index else kind
            place.plot(range(1, len(curve) + 1), curve, style, color=colour, label=label, linewidth=1.3)
    place.set(xlabel="step", ylabel="reward")
    place.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
