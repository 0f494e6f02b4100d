"""The stories of the task arith, computed from (split, seed, index); written into qerl/data/tasks as the task's rows:

    python scripts/models/stories.py

A problem is a row of KINDS (a story and its steps) in one of its phrasings, with names, things and numbers drawn at
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
from collections.abc import Iterator
from dataclasses import dataclass

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


KINDS: tuple[Kind, ...] = (
    Kind(
        "boxes_less",
        {"a": (2, 9), "b": (2, 9), "c": (2, 30)},
        ("a * b", "1 - c"),
        (
            "{A} has {a} {holders} with {b} {things} in each. {She} gives {c} {things} to {B}. "
            "How many {things} does {A} have left?",
            "There are {a} {holders} of {b} {things} on the table. {A} takes {c} of the {things} away. "
            "How many {things} are left?",
        ),
    ),
    Kind(
        "boxes_more",
        {"a": (2, 9), "b": (2, 9), "c": (3, 40)},
        ("a * b", "1 + c"),
        (
            "{A} fills {a} {holders} with {b} {things} each and has {c} {things} over. "
            "How many {things} does {A} have in all?",
            "{A} buys {a} {holders} of {b} {things}. {She} had {c} {things} before. "
            "How many {things} does {she} have now?",
        ),
    ),
    Kind(
        "boxes_both",
        {"a": (2, 9), "b": (2, 9), "c": (2, 30), "d": (2, 30)},
        ("a * b", "1 - c", "2 + d"),
        (
            "{A} has {a} {holders} with {b} {things} each. {She} gives {c} to {B} and then finds {d} more. "
            "How many {things} does {A} have now?",
            "{A} packs {a} {holders} of {b} {things}. {B} takes {c} of them, and {C} brings {d} new ones. "
            "How many {things} are there now?",
        ),
    ),
    Kind(
        "come_and_go",
        {"a": (10, 60), "b": (2, 30), "c": (2, 30)},
        ("a + b", "1 - c"),
        (
            "{A} has {a} {things}. {She} gets {b} more from {B} and loses {c}. How many {things} does {A} have now?",
            "A bus leaves with {a} people. At the first stop {b} get on and {c} get off. "
            "How many people are on the bus now?",
        ),
    ),
    Kind(
        "go_and_come",
        {"a": (15, 60), "b": (2, 30), "c": (2, 30), "d": (2, 20)},
        ("a - b", "1 + c", "2 - d"),
        (
            "{A} has {a} {things}. {She} sells {b}, buys {c} and then gives {d} to {B}. "
            "How many {things} does {A} have left?",
            "There are {a} people in the park. Then {b} go home, {c} come in, and {d} more go home. "
            "How many people are in the park now?",
        ),
    ),
    Kind(
        "times_together",
        {"a": (3, 25), "b": (2, 3)},
        ("a * b", "a + 1"),
        (
            "{A} has {a} {things}. {B} has {b} times as many. How many {things} do they have together?",
            "{A} found {a} {things} and {B} found {b} times as many. How many {things} did they find in all?",
        ),
    ),
    Kind(
        "more_together",
        {"a": (3, 40), "b": (2, 20)},
        ("a + b", "a + 1"),
        (
            "{A} has {a} {things}. {B} has {b} more than {A}. How many {things} do they have together?",
            "{A} read {a} pages. {B} read {b} pages more than {A}. How many pages did they read in all?",
        ),
    ),
    Kind(
        "three_friends",
        {"a": (3, 25), "b": (2, 15), "c": (2, 3)},
        ("a + b", "a * c", "1 + 2"),
        (
            "{A} has {a} {things}. {B} has {b} more than {A}, and {C} has {c} times as many as {A}. "
            "How many {things} do {B} and {C} have together?",
        ),
    ),
    Kind(
        "two_prices",
        {"a": (2, 9), "b": (2, 9), "c": (2, 9), "d": (2, 9)},
        ("a * b", "c * d", "1 + 2"),
        (
            "{A} buys {a} {things} for {b} dollars each and {c} hats for {d} dollars each. "
            "How many dollars does {A} pay?",
            "In a shop {A} pays for {a} {things} at {b} dollars and {c} cups at {d} dollars. "
            "How much does {she} pay in all?",
        ),
    ),
    Kind(
        "change",
        {"a": (2, 9), "b": (2, 9), "c": (2, 30), "d": (40, 99)},
        ("a * b", "1 + c", "d - 2"),
        (
            "{A} has {d} dollars. {She} buys {a} {things} for {b} dollars each and a bag for {c} dollars. "
            "How many dollars does {A} have left?",
        ),
    ),
    Kind(
        "wages",
        {"a": (3, 9), "b": (3, 9), "c": (2, 30)},
        ("a * b", "1 - c"),
        (
            "{A} earns {a} dollars an hour and works {b} hours. {She} spends {c} dollars. "
            "How many dollars does {she} have left?",
        ),
    ),
    Kind(
        "savings",
        {"a": (2, 9), "b": (2, 9), "c": (5, 30), "d": (2, 20)},
        ("a * b", "1 + c", "2 - d"),
        (
            "{A} saves {a} dollars a week for {b} weeks. {She} gets {c} dollars from {B} and spends {d} dollars. "
            "How many dollars does {A} have now?",
        ),
    ),
    Kind(
        "pages_left",
        {"a": (40, 99), "b": (3, 9), "c": (2, 9)},
        ("b * c", "a - 1"),
        (
            "A book has {a} pages. {A} reads {b} pages a day for {c} days. How many pages are left?",
            "{A} has {a} {things} and gives {b} of them to each of {c} friends. How many {things} does {A} have left?",
        ),
    ),
    Kind(
        "rows",
        {"a": (3, 9), "b": (3, 9), "c": (2, 5), "d": (2, 6)},
        ("a * b", "c * d", "1 - 2"),
        (
            "A room has {a} rows of {b} chairs. {A} carries out {c} chairs at a time and goes {d} times. "
            "How many chairs are left?",
            "{A} plants {a} rows of {b} trees. A storm breaks {c} trees a day for {d} days. How many trees are left?",
        ),
    ),
    Kind(
        "baking",
        {"a": (2, 9), "b": (2, 9), "c": (2, 20), "d": (2, 15), "e": (2, 15)},
        ("a * b", "1 + c", "2 - d", "3 - e"),
        (
            "{A} bakes {a} trays of {b} cookies and {B} brings {c} more. {A} eats {d} and {B} eats {e}. "
            "How many cookies are left?",
        ),
    ),
    Kind(
        "long_trip",
        {"a": (2, 9), "b": (2, 9), "c": (2, 15), "d": (2, 25), "e": (2, 25)},
        ("a * b", "1 - c", "2 + d", "3 + e"),
        (
            "A train has {a} cars with {b} people in each. At the first stop {c} get off and {d} get on. "
            "At the next stop {e} more get on. How many people are on the train now?",
        ),
    ),
)


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
    raise AssertionError("10,000 draws without a problem: a row of KINDS admits no numbers")


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
