"""Longer arithmetic word problems: an opening, two to four events, MIN_STEPS to MAX_STEPS steps of + - * / up to 999.

They are computed as the task arith's are, and split by the same rule. The stories are composed of parts, some
sentences change nothing, and results have up to three digits. A model of 20 M parameters that reads and calculates well
solves them; the embedded one does not.

    >>> problem("train", seed=0, index=0).worked  # one step per line, then "#### " and the answer
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from qerl.data.tasks.arith import Problem, Split, check_split, draw_words, generated, split_of


@dataclass(frozen=True)
class Part:
    """A sentence or two of a story.

    `numbers` maps each letter to its inclusive range. A step is "left op right", where each side is a letter, "v" (the
    value before this part), or the number of an earlier step of this part, counted from 1. The value after the part is
    the result of its last step; without steps, the value of an opening is its letter a, and an event changes nothing.
    Every phrasing names each letter once.
    """

    name: str
    numbers: dict[str, tuple[int, int]]
    steps: tuple[str, ...]
    phrasings: tuple[str, ...]


OPENINGS: tuple[Part, ...] = (
    Part(
        "owns",
        {"a": (20, 300)},
        (),
        ("{A} has {a} {things}.", "{A} starts the week with {a} {things}.", "There are {a} {things} in {A}'s shop."),
    ),
    Part(
        "holders",
        {"a": (3, 25), "b": (3, 12)},
        ("a * b",),
        (
            "{A} has {a} {holders} with {b} {things} in each.",
            "{A} fills {a} {holders} with {b} {things} each.",
            "On {A}'s table are {a} {holders} of {b} {things}.",
        ),
    ),
    Part(
        "two_kinds",
        {"a": (2, 12), "b": (3, 12), "c": (2, 12), "d": (3, 12)},
        ("a * b", "c * d", "1 + 2"),
        (
            "{A} buys {a} {holders} of {b} {things} and {c} {holders} of {d} {things}.",
            "{A} packs {b} {things} into each of {a} {holders} and {d} into each of {c} more.",
        ),
    ),
    Part(
        "times",
        {"a": (8, 90), "b": (2, 6)},
        ("a * b", "a + 1"),
        (
            "{A} has {a} {things} and {B} has {b} times as many. They put them all together and {A} keeps them.",
            "{B} found {a} {things}. {A} found {b} times as many, and {B} gives all of {B}'s to {A}.",
        ),
    ),
    Part(
        "days",
        {"a": (4, 40), "b": (3, 9), "c": (10, 90)},
        ("a * b", "c + 1"),
        (
            "{A} had {c} {things} and makes {a} more a day for {b} days.",
            "{A} collects {a} {things} a day. After {b} days {she} adds them to the {c} {things} at home.",
        ),
    ),
)

EVENTS: tuple[Part, ...] = (
    Part(
        "gain",
        {"a": (5, 150)},
        ("v + a",),
        ("{B} gives {A} {a} more.", "Then {A} finds {a} more.", "{She} gets {a} {things} from {C}."),
    ),
    Part(
        "lose",
        {"a": (5, 150)},
        ("v - a",),
        ("{A} loses {a} of them.", "Then {A} sells {a} {things}.", "{B} takes {a} of them."),
    ),
    Part(
        "gain_holders",
        {"a": (2, 12), "b": (3, 12)},
        ("a * b", "v + 1"),
        ("{A} buys {a} more {holders} with {b} in each.", "{C} brings {a} {holders} of {b} {things}."),
    ),
    Part(
        "give_friends",
        {"a": (2, 12), "b": (2, 12)},
        ("a * b", "v - 1"),
        ("{A} gives {b} to each of {a} friends.", "Each of {a} children gets {b} of the {things}."),
    ),
    Part(
        "times",
        {"a": (2, 5)},
        ("v * a",),
        ("A month later {she} has {a} times as many.", "After a good year the number is {a} times as large."),
    ),
    Part(
        "share",
        {"a": (2, 9)},
        ("v / a",),
        (
            "{A} makes {a} equal parts and keeps one.",
            "The {things} are shared equally by {a} people, and {A} is one of them.",
        ),
    ),
    Part(
        "swap",
        {"a": (5, 60), "b": (5, 60)},
        ("v - a", "1 + b"),
        ("{A} sells {a} and buys {b} others.", "{She} gives {a} to {B} and gets {b} back from {C}."),
    ),
    Part(
        "aside",
        {"a": (2, 90)},
        (),
        ("{B} has {a} hats.", "{C} is {a} years old.", "That day {a} people walk by."),
    ),
)

QUESTIONS = (
    "How many {things} does {A} have now?",
    "How many {things} does {she} have in the end?",
    "How many {things} does {A} have left?",
)


MAX_RESULT = 999
MIN_STEPS, MAX_STEPS = 3, 7
EVENT_COUNTS = (2, 3, 4)
DRAWS_OF_NUMBERS = 8  # for one part, before another part is drawn
TASK_ROWS = {"train": 16384, "test": 2048}


def problem(split: Split, seed: int, index: int) -> Problem:
    """The problem with this number: the first draw from (seed, index) whose question belongs to `split`.

    Its kind is the name of its opening. Raises DataError for a split that does not exist.
    """
    check_split("arith_chain", TASK_ROWS, split)
    rng = random.Random(f"arith_chain/{seed}/{index}")
    for _ in range(100_000):
        made = _draw(rng)
        if made is None or not MIN_STEPS <= len(made[2]) <= MAX_STEPS:
            continue
        kind, question, steps, answer = made
        if split_of(question) == split:
            return Problem(f"arith_chain-{split}-{seed}-{index}", kind, question, steps, answer)
    raise AssertionError("100,000 draws without a problem: the parts admit no numbers")


def problems(split: Split, seed: int, count: int, start: int = 0) -> Iterator[Problem]:
    """`count` problems from number `start` on. A question may occur twice within a split, but not in both splits."""
    for index in range(start, start + count):
        yield problem(split, seed, index)


def _draw(rng: random.Random) -> tuple[str, str, tuple[str, ...], int] | None:
    """The opening's name, question, steps and answer of a story; None if no numbers were found for its opening."""
    opening = rng.choice(OPENINGS)
    began = _play(opening, 0, rng)
    if began is None:
        return None
    numbers, written, value = began
    words = draw_words(rng)
    sentences = [rng.choice(opening.phrasings).format(**numbers, **words)]
    steps, previous = list(written), opening.name
    for _ in range(rng.choice(EVENT_COUNTS)):
        event = rng.choice(EVENTS)
        happened = _play(event, value, rng) if event.name != previous else None
        if happened is None:
            continue
        numbers, written, value = happened
        sentences.append(rng.choice(event.phrasings).format(**numbers, **words))
        steps += written
        previous = event.name
    sentences.append(rng.choice(QUESTIONS).format(**words))
    return opening.name, " ".join(sentences), tuple(steps), value


def _play(part: Part, value: int, rng: random.Random) -> tuple[dict[str, int], list[str], int] | None:
    """Numbers drawn for a part, its steps with these numbers, and the value after it; None if no numbers were found."""
    for _ in range(DRAWS_OF_NUMBERS):
        numbers = {letter: rng.randint(low, high) for letter, (low, high) in part.numbers.items()}
        solved = _solve(part, value, numbers)
        if solved is not None:
            return numbers, *solved
    return None


def _solve(part: Part, value: int, numbers: dict[str, int]) -> tuple[list[str], int] | None:
    """The written steps and the value after the part; None if a result is not an integer from 1 to MAX_RESULT."""
    values = {"v": value, **numbers}
    written = []
    result = value or numbers["a"]
    for position, step in enumerate(part.steps, start=1):
        left, op, right = step.split()
        x, y = values[left], values[right]
        if op == "/" and x % y:
            return None
        result = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[op]
        if not 1 <= result <= MAX_RESULT:
            return None
        values[str(position)] = result
        written.append(f"{x} {op} {y} = {result}")
    return written, result


# The model made for this task needs no instruction.
TASK = generated("arith_chain", TASK_ROWS, problems, "{question}")
rows = TASK.generate
