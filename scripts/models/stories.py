"""The stories of the task arith, computed from (split, seed, index); written into qerl/data/tasks as the task's rows:

    python scripts/models/stories.py

A problem is a story of stories.txt with its steps, in one of its phrasings, with names, things and numbers drawn at
random: two to four steps of + - * on small numbers, with every result between 1 and MAX_RESULT. A hash of the
normalized question decides to which split a problem belongs, so no question is in two splits.

    >>> problem("train", seed=0, index=0).worked  # one step per line, then "#### " and the answer

The rows of the task have seed 0. The embedded model was pretrained on another seed of the train split
(scripts/models/tiny_checkpoint.py), and no training ever sees the test split.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qerl.data.tasks.arith import file_of
from qerl.data.tasks.word_game import THINGS, Split, split_of

NAMES = {
    "she": ("Mia", "Anna", "Lena", "Nora", "Ella", "Zoe", "Ruth", "Ivy", "Maya", "Lucy"),
    "he": ("Tom", "Ben", "Sam", "Leo", "Max", "Omar", "Paul", "Ravi", "Hugo", "Finn"),
}
HOLDERS = ("boxes", "bags", "baskets", "jars", "packs")


@dataclass(frozen=True)
class Kind:
    """A story.

    `numbers` maps each letter to its inclusive range. A step is "left op right", where each side is a letter or the
    number of an earlier step, counted from 1. Every phrasing names each letter once.
    """

    name: str
    numbers: dict[str, tuple[int, int]]
    steps: tuple[str, ...]
    phrasings: tuple[str, ...]


def kinds_in(text: str) -> tuple[Kind, ...]:
    """The stories of a text: "name: a 2-9, b 2-30: a * b, 1 - a", and below it each phrasing on an indented line."""
    made = []
    for story in re.split(r"\n(?=\S)", text.strip()):
        head, *phrasings = story.splitlines()
        name, numbers, steps = head.split(": ")
        ranges = {letter: (int(low), int(high)) for letter, low, high in re.findall(r"(\w) (\d+)-(\d+)", numbers)}
        made.append(Kind(name, ranges, tuple(steps.split(", ")), tuple(map(str.strip, phrasings))))
    return tuple(made)


KINDS = kinds_in(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
MAX_RESULT = 99
TASK_SEED = 0
TASK_ROWS = {"train": 8192, "test": 1024}


@dataclass(frozen=True)
class Problem:
    """One problem. A step reads "4 * 6 = 24"; `answer` is the result of the last one."""

    id: str
    kind: str
    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def worked(self) -> str:
        """The solution with one step per line, ending in the answer as GSM8K marks it."""
        return "\n".join((*self.steps, self.direct))

    @property
    def direct(self) -> str:
        """The answer alone, as GSM8K marks it."""
        return f"#### {self.answer}"


def problem(split: Split, seed: int, index: int) -> Problem:
    """The problem with this number: the first draw from (seed, index) whose question belongs to `split`."""
    for attempt in range(10_000):
        rng = random.Random(f"arith/{seed}/{index}/{attempt}")
        kind = rng.choice(KINDS)
        drawn = _draw_numbers(kind, rng)
        if drawn is None:
            continue
        numbers, steps, answer = drawn
        question = rng.choice(kind.phrasings).format(**numbers, **draw_words(rng))
        if split_of(question) == split:
            return Problem(f"arith-{split}-{seed}-{index}", kind.name, question, steps, answer)
    raise AssertionError("10,000 draws without a problem: a story admits no numbers")


def problems(split: Split, seed: int, count: int, start: int = 0) -> Iterator[Problem]:
    """`count` problems from number `start` on. A question may occur twice within a split, but not in both splits."""
    for index in range(start, start + count):
        yield problem(split, seed, index)


def _draw_numbers(kind: Kind, rng: random.Random) -> tuple[dict[str, int], tuple[str, ...], int] | None:
    """Numbers drawn for a kind, its steps with these numbers, and the answer; None if a result is out of range."""
    numbers = {letter: rng.randint(low, high) for letter, (low, high) in kind.numbers.items()}
    values: dict[str, int] = dict(numbers)
    written = []
    for position, step in enumerate(kind.steps, start=1):
        left, op, right = step.split()
        x, y = values[left], values[right]
        result = {"+": x + y, "-": x - y, "*": x * y}[op]
        if not 1 <= result <= MAX_RESULT:
            return None
        values[str(position)] = result
        written.append(f"{x} {op} {y} = {result}")
    return numbers, tuple(written), result


def draw_words(rng: random.Random) -> dict[str, str]:
    """Three different people, the pronoun of the first, a kind of thing and a kind of container."""
    pronoun = rng.choice(tuple(NAMES))
    first = rng.choice(NAMES[pronoun])
    others = [name for names in NAMES.values() for name in names if name != first]
    second, third = rng.sample(others, 2)
    return {
        "A": first,
        "B": second,
        "C": third,
        "she": pronoun,
        "She": pronoun.capitalize(),
        "things": rng.choice(THINGS),
        "holders": rng.choice(HOLDERS),
    }


def task_problems(split: Split) -> Iterator[Problem]:
    """The problems of the task: the first of TASK_SEED, each question once."""
    seen: set[str] = set()
    for each in problems(split, TASK_SEED, 2 * TASK_ROWS[split]):
        if each.question not in seen:
            seen.add(each.question)
            yield each
        if len(seen) == TASK_ROWS[split]:
            return


def row(made: Problem) -> dict[str, str]:
    """A row of the task's file."""
    return {"id": made.id, "kind": made.kind, "question": made.question, "worked": made.worked}


if __name__ == "__main__":
    for split in TASK_ROWS:
        text = "".join(json.dumps(row(each)) + "\n" for each in task_problems(split))
        file_of(split).write_bytes(gzip.compress(text.encode(), 9, mtime=0))
