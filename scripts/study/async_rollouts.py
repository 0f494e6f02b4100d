#!/usr/bin/env python3
"""Would a run on several cards be faster if some of them sampled while the others train? A calculation; prints a table.

    python3 scripts/study/async_rollouts.py [--cards 2 4 8] [--lengths LENGTHS.json] [--out F]

By measured seconds of one card (a 7B on an H200, workload A: 16 prompts x 8 completions): a decode step by how many
sequences are still being sampled, and training by tokens. `--lengths` is a JSON list of completions' tokens, of a
recorded run for example, from which groups are drawn. The ways, per 128 completions:

    same batch      every card samples its share of the groups, and then trains on its share
    larger batch    the same with as many times the groups as there are cards
    split           some cards sample a whole batch while the others train on the one before, at the best split
    no tail         as the first, with completions that go on in the next step, so that the samplers are always full
    split, no tail  both
    carry over N    the first with `rollout.carry_over: N`, by its rules: each card waits for whole groups of its own,
                    and computes the keys and values of what goes on once more, which "no tail" leaves out

All but the two first train on completions of an older policy, with `rollout.carry_over` on tokens of the mean age that
is given, in steps. Sending the adapter, gathering completions and imbalances of training are not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PROMPTS, GROUP, PROMPT_TOKENS, LONGEST = 16, 8, 128, 1024
OTHER_S = 0.30  # of a step, on every card: putting the engine to sleep, batches, logs (docs/several-gpus.md)
TRAIN_S = 3.58 / (PROMPTS * (PROMPT_TOKENS + GROUP * 512))  # of a token on one card (benchmarks/step-7b-qerl.json)
DRAWS = 200
PREFILL_S = 0.3877 / (PROMPTS * GROUP * PROMPT_TOKENS)  # of a token (benchmarks/rollout-7b-qerl.json)
CARRIED = (1, 2, 4)  # values of `rollout.carry_over`
STEPS_CARRIED = 100
Lengths = Callable[[random.Random], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--lengths", type=Path, help="a JSON list of lengths in tokens")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    kinds: dict[str, Lengths] = {"512 each": lambda _: 512, "geometric, mean 300": geometric(300)}
    if arguments.lengths:
        recorded = json.loads(arguments.lengths.read_text(encoding="utf-8"))
        kinds[f"recorded, mean {mean(recorded):.0f}"] = lambda drawn: drawn.choice(recorded)
    found = {name: {cards: seconds(lengths, cards) for cards in arguments.cards} for name, lengths in kinds.items()}
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, of_cards in found.items():
        for cards, ways in of_cards.items():
            print(f"{name}, {cards} cards: " + ", ".join(f"{way} {value:.2f}" for way, value in ways.items()))


def geometric(wanted: int) -> Lengths:
    """Completions that end at each token with the same probability, and at LONGEST at the latest."""
    return lambda drawn: min(LONGEST, 1 + int(drawn.expovariate(1 / wanted)))


def seconds(lengths: Lengths, cards: int) -> dict[str, float]:
    """The mean seconds of each way per 128 completions."""
    drawn = random.Random(0)
    batches = [[[lengths(drawn) for _ in range(GROUP)] for _ in range(PROMPTS * cards)] for _ in range(DRAWS)]
    one = [batch[:PROMPTS] for batch in batches]
    found = {
        "one card": mean(map(rollout, one)) + mean(map(training, one)) + OTHER_S,
        "same batch": mean(together(batch, cards) for batch in one),
        "larger batch": mean(together(batch, cards) for batch in batches) / cards,
    }
    splits = range(1, cards)
    train = mean(map(training, one))
    apart = {n: mean(max(rollout(part) for part in dealt(batch, n)) for batch in one) for n in splits}
    tokens = mean(sum(map(sum, batch)) for batch in one)
    found["split"] = min(max(apart[n], train / (cards - n)) for n in splits) + OTHER_S
    found["no tail"] = full(tokens, cards) + train / cards + OTHER_S
    found["split, no tail"] = min(max(full(tokens, n), train / (cards - n)) for n in splits) + OTHER_S
    for longest in CARRIED:
        sampling, found[f"age {longest}"] = carried_over(lengths, cards, longest)
        found[f"carry over {longest}"] = sampling + prefill(PROMPTS / cards) + train / cards + OTHER_S
    return found


@dataclass
class Going:
    """A group in progress: the step in which it began, the tokens each completion has drawn, and will have."""

    since: int
    drawn: list[int]
    lengths: list[int]
    age: int = 0  # the sum over the drawn tokens of the step that drew them

    def left(self) -> list[int]:
        return [length - drawn for drawn, length in zip(self.drawn, self.lengths, strict=True) if length > drawn]

    def advance(self, tokens: int, step: int) -> None:
        """Each completion that has not ended draws so many tokens."""
        self.age += len(self.left()) * tokens * step
        self.drawn = [min(drawn + tokens, length) for drawn, length in zip(self.drawn, self.lengths, strict=True)]


class Sampled(NamedTuple):
    """One card's sampling in a step: its seconds, its decode steps, and the groups that it trains on."""

    seconds: float
    decode_steps: int
    trained: list[Going]


def carried_over(lengths: Lengths, cards: int, longest: int) -> tuple[float, float]:
    """Seconds of sampling per step of the slowest card, and the mean age of the tokens that are trained on."""
    drawn, groups = random.Random(0), max(1, PROMPTS // cards)
    pools: list[list[Going]] = [[] for _ in range(cards)]
    slowest, ages, tokens = [], 0, 0
    for step in range(STEPS_CARRIED):
        of_cards = [sample(pool, groups, step, longest, lambda: lengths(drawn)) for pool in pools]
        if step < 2 * longest:  # until the cards are full
            continue
        slowest.append(max(card.seconds for card in of_cards))
        for group in (group for card in of_cards for group in card.trained):
            tokens += sum(group.lengths)
            ages += step * sum(group.lengths) - group.age
    return mean(slowest), ages / tokens


def sample(pool: list[Going], groups: int, step: int, longest: int, length: Callable[[], int]) -> Sampled:
    """One card's sampling in a step; the groups that it trains on leave the pool."""
    from training.rollout.carry_over import due

    needed = due([group.since for group in pool], groups, step, longest)
    begun = [(drawn, length) for group in pool for drawn, length in zip(group.drawn, group.lengths, strict=True)]
    total, decode_steps = PREFILL_S * sum(drawn for drawn, length in begun if drawn < length), 0
    while True:
        while sum(len(group.left()) for group in pool) <= (groups - 1) * GROUP and len(pool) < (longest + 1) * groups:
            pool.append(Going(step, [0] * GROUP, [length() for _ in range(GROUP)]))
        ended = [group for group in pool if not group.left()]
        if len(ended) >= groups and not any(group.left() for group in pool[:needed]):
            break
        left = [tokens for group in pool for tokens in group.left()]
        total += min(left) * decode(len(left))
        decode_steps += min(left)
        for group in pool:
            group.advance(min(left), step)
    trained = ended[:groups]
    pool[:] = [group for group in pool if not any(group is other for other in trained)]
    return Sampled(total, decode_steps, trained)


def full(tokens: float, cards: int) -> float:
    """To sample so many tokens on cards that always have their share of 128 sequences to sample."""
    at_once = PROMPTS * GROUP / cards
    return tokens / cards / at_once * decode(at_once) + prefill(PROMPTS / cards)


def dealt(batch: Sequence[Sequence[int]], cards: int) -> list[Sequence[Sequence[int]]]:
    """The groups of each card, neighbours together."""
    return [batch[len(batch) * card // cards : len(batch) * (card + 1) // cards] for card in range(cards)]


def together(batch: Sequence[Sequence[int]], cards: int) -> float:
    """A step in which all cards sample, and then all train."""
    return max(map(rollout, dealt(batch, cards))) + training(batch) / cards + OTHER_S


def rollout(groups: Sequence[Sequence[int]]) -> float:
    """From the prompts to the end of the longest completion."""
    lengths, ended, total = sorted(length for group in groups for length in group), 0, 0.0
    for index, length in enumerate(lengths):
        total += (length - ended) * decode(len(lengths) - index)
        ended = length
    return total + prefill(len(groups))


def prefill(prompts: float) -> float:
    """Of so many prompts and the first tokens of their groups (benchmarks/rollout-7b-qerl.json)."""
    return 0.3877 * prompts / PROMPTS


def training(groups: Sequence[Sequence[int]]) -> float:
    """Forward and backward on one card."""
    return TRAIN_S * (PROMPT_TOKENS * len(groups) + sum(map(sum, groups)))


def decode(sequences: float) -> float:
    """Of a decode step, between the measured numbers of sequences."""
    steps = STEPS
    for (low, before), (high, after) in pairwise(steps):
        if sequences <= high:
            return before + (after - before) * max(0.0, sequences - low) / (high - low)
    return steps[-1][1] * sequences / steps[-1][0]


def measured() -> list[tuple[int, float]]:
    """(sequences, seconds of a decode step), with an adapter of rank 32."""
    rates = json.loads((ROOT / "benchmarks" / "rollout-7b-qerl.json").read_text(encoding="utf-8"))
    return [(int(count), int(count) / rate) for count, rate in rates["decode_tokens_per_s"].items()]


STEPS = measured()

if __name__ == "__main__":
    main()
