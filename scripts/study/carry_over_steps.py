#!/usr/bin/env python3
"""How many decode steps a training step takes with `rollout.carry_over`: by the calculation, and by a run's own code.

    python3 scripts/study/carry_over_steps.py [--prompts 8] [--mean 24] [--longest 80] [--out F]

Completions have geometric lengths. The calculation is `sample` of scripts/study/async_rollouts.py, which has its rules
from the documentation. The run's own code is `Pool` (training/rollout/carry_over.py), which is asked here as an engine
asks it, without a model: a completion that goes on has again a geometric number of tokens to draw. Their lengths differ
by chance. The steps until a card is full are left out. Without carry-over a step takes as many decode steps as its
longest completion has tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qerl.engine.interface import Completion, Request
    from training.rollout.carry_over import Pool

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

CARRIED = (1, 2, 4)  # values of `rollout.carry_over`
STEPS = 400


def main() -> None:
    from scripts.bench.provenance import command, machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, with 8 completions each")
    parser.add_argument("--mean", type=float, default=24, help="tokens of a completion that has no limit")
    parser.add_argument("--longest", type=int, default=80, help="tokens of a completion at most")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    steps = decode_steps(given.prompts, given.mean, given.longest)
    if given.out:
        report = {"command": command(), **machine(), "decode_steps": steps}
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for kind, of_each in steps.items():
        print(f"{kind}: " + ", ".join(f"{longest}: {value:.1f}" for longest, value in of_each.items()))


def decode_steps(prompts: int, wanted: float, longest: int, steps: int = STEPS) -> dict[str, dict[int, float]]:
    """The mean decode steps of a training step, by way of counting and by `rollout.carry_over`."""
    calculated, sampled = {0: waiting(prompts, wanted, longest, steps)}, {}
    for carried in CARRIED:
        calculated[carried] = mean(by_calculation(prompts, wanted, longest, carried, steps)[2 * carried :])
        sampled[carried] = mean(by_pool(prompts, wanted, longest, carried, steps)[2 * carried :])
    return {"calculated": calculated, "by the run's code": sampled}


def length(drawn: random.Random, wanted: float, longest: int) -> int:
    """Tokens of a completion."""
    return min(longest, 1 + int(drawn.expovariate(1 / wanted)))


def waiting(prompts: int, wanted: float, longest: int, steps: int) -> float:
    """Without carry-over: the longest completion of a step."""
    from scripts.study.async_rollouts import GROUP

    drawn = random.Random(0)
    return mean(max(length(drawn, wanted, longest) for _ in range(prompts * GROUP)) for _ in range(steps))


def by_calculation(prompts: int, wanted: float, longest: int, carried: int, steps: int) -> list[int]:
    """The decode steps of each training step, by the calculation for one card."""
    from scripts.study.async_rollouts import Going, sample

    drawn = random.Random(0)
    pool: list[Going] = []
    new = partial(length, drawn, wanted, longest)
    return [sample(pool, prompts, step, carried, new).decode_steps for step in range(steps)]


def by_pool(prompts: int, wanted: float, longest: int, carried: int, steps: int) -> list[int]:
    """The decode steps of each training step, by the code that decides in a run what goes on."""
    from qerl.data.tasks import Example
    from qerl.engine.interface import SamplingParams
    from scripts.study.async_rollouts import GROUP
    from training.rollout.carry_over import Kept, Pool, Share
    from training.rollout.groups import Prompt

    rows = (steps + carried) * prompts
    data = [Prompt(row, [row], "", Example("", "", 0)) for row in range(rows)]
    share = Share(data, lambda number: number, rows, prompts, GROUP, all_groups=prompts)
    drawn, kept, found = random.Random(0), Kept(), []
    for step in range(steps):
        pool = Pool(kept, share, SamplingParams(longest), step, carried)
        decode_steps, unfinished = served(pool, lambda request: length(drawn, wanted, request.sampling.max_new_tokens))
        kept = pool.settle(unfinished)[1]
        found.append(decode_steps)
    return found


def served(pool: Pool, tokens: Callable[[Request], int]) -> tuple[int, dict[int, Completion]]:
    """Sample for a pool as an engine does: the decode steps until it has enough, and what is unfinished then."""
    begun: dict[int, int] = {}  # the decode step in which each request began
    end: dict[int, int] = {}  # and in which it draws its last token
    now = 0
    while (new := pool.begin()) is not None:
        for request in new:
            begun[request.index], end[request.index] = now, now + tokens(request)
        asked = False
        while not asked:
            now = min(end.values())
            over = [index for index, at in end.items() if at == now]
            asked = pool.ended(over)
            for index in over:
                pool.finished(index, drawn_tokens(end.pop(index) - begun[index], "stop"))
    return now, {index: drawn_tokens(now - begun[index], "unfinished") for index in end}


def drawn_tokens(count: int, ended: str) -> Completion:
    """A completion, or a part of one, of so many tokens."""
    from qerl.engine.interface import Completion

    return Completion([0] * count, [0.0] * count, ended)


if __name__ == "__main__":
    main()
