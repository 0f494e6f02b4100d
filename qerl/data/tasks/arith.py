"""Arithmetic word problems with worked answers, computed from (split, seed, index) without any file or download.

A problem is a row of KINDS (a story and its steps) in one of its phrasings, with names, things and numbers drawn at
random: two to four steps of + - * on small numbers, with every result between 1 and MAX_RESULT. A hash of the
normalized question decides to which split a problem belongs, so no question is in two splits.

    >>> problem("train", seed=0, index=0).worked  # one step per line, then "#### " and the answer

The rows of the task have seed 0. The embedded model was pretrained on another seed of the train split
(scripts/models/tiny_checkpoint.py), and no training ever sees the test split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qerl.base.errors import DataError
from qerl.data.tasks import Task

NAMES = {
    "she": ("Mia", "Anna", "Lena", "Nora", "Ella", "Zoe", "Ruth", "Ivy", "Maya", "Lucy"),
    "he": ("Tom", "Ben", "Sam", "Leo", "Max", "Omar", "Paul", "Ravi", "Hugo", "Finn"),
}
THINGS = (
    "pens", "books", "cards", "coins", "stamps", "shells", "apples", "pears", "plums", "eggs",
    "cookies", "stickers", "balls", "beads", "stones", "nuts", "lemons", "candles", "buttons", "marbles",
)  # fmt: skip
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


Split = Literal["train", "test"]

MAX_RESULT = 99
TEST_SHARE = 0.1  # share of all possible questions that belong to the test split
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
    """The problem with this number: the first draw from (seed, index) whose question belongs to `split`.

    Raises DataError for a split that does not exist.
    """
    check_split("arith", TASK_ROWS, split)
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


def split_of(question: str) -> Split:
    """The split that this question belongs to, decided by the hash of its words in lower case with single spaces."""
    digest = hashlib.sha256(" ".join(question.lower().split()).encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") < TEST_SHARE * 2**32 else "train"


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


def check_split(name: str, counts: Mapping[str, int], split: str) -> None:
    """Raise DataError for a split that a generated task does not have."""
    if split not in counts:
        raise DataError(f"task {name} has no split {split!r}: write {' or '.join(map(repr, counts))}")


def generated(
    name: str, counts: Mapping[str, int], made: Callable[[Split, int, int], Iterator[Problem]], template: str
) -> Task:
    """A task whose rows are the first `counts[split]` different questions of `made(split, TASK_SEED, count)`."""

    def each_once(split: str) -> Iterator[Problem]:
        check_split(name, counts, split)
        seen: set[str] = set()
        for each in made(split, TASK_SEED, 2 * counts[split]):
            if each.question in seen:
                continue
            seen.add(each.question)
            yield each
            if len(seen) == counts[split]:
                return

    def rows(split: str) -> Iterator[dict[str, Any]]:
        for each in each_once(split):
            yield {"question": each.question, "answer": str(each.answer), "id": each.id, "kind": each.kind}

    def solved(split: str) -> Iterator[dict[str, Any]]:
        for each in each_once(split):
            yield {"question": each.question, "answer": each.worked, "id": each.id}

    splits = {split: split for split in counts}
    return Task(
        name=name,
        hub=None,
        splits=splits,
        answer_kind="number",
        generate=rows,
        solved=solved,
        prompt_template=template,
    )


# The embedded model needs no instruction: it ends in "#### N" by itself.
TASK = generated("arith", TASK_ROWS, problems, "{question}")
rows = TASK.generate
