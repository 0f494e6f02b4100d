"""Arithmetic word problems with worked answers, computed from (split, seed, index) without any file or download.

A problem is a row of KINDS (a story and its steps) in one of its phrasings, with names, things and numbers drawn at
random: two to four steps of + - * on small numbers, with every result between 1 and MAX_RESULT. The splits share the
stories but no question, because a hash of the normalized question decides to which split a problem belongs, whatever
its seed and index.

    >>> problem("train", seed=0, index=0).worked  # one step per line, then "#### " and the answer

The rows of the task have seed 0. The embedded model was pretrained on another seed of the train split
(scripts/models/tiny_checkpoint.py), and no training ever sees the test split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from qerl.base.errors import DataError
from qerl.data.tasks import Task
from qerl.data.tasks.arith_kinds import HOLDERS, KINDS, NAMES, THINGS, Kind

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
    _known(split)
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


def rows(split: str) -> Iterator[dict[str, Any]]:
    """The rows of the task, each question once, generated lazily."""
    for made in _each_once(split):
        yield {"question": made.question, "answer": str(made.answer), "id": made.id, "kind": made.kind}


def solved(split: str) -> Iterator[dict[str, Any]]:
    """The same rows with their worked solutions, to learn from."""
    for made in _each_once(split):
        yield {"question": made.question, "answer": made.worked, "id": made.id}


def _each_once(split: str) -> Iterator[Problem]:
    count = TASK_ROWS[_known(split)]
    seen: set[str] = set()
    for made in problems(split, TASK_SEED, 2 * count):
        if made.question in seen:
            continue
        seen.add(made.question)
        yield made
        if len(seen) == count:
            return


def _known(split: str) -> str:
    if split not in TASK_ROWS:
        raise DataError(f"task arith has no split {split!r}: write {' or '.join(map(repr, TASK_ROWS))}")
    return split


TASK = Task(
    name="arith",
    hub=None,
    splits={"train": "train", "test": "test"},
    answer_kind="number",
    generate=rows,
    solved=solved,
    prompt_template="{question}",  # the embedded model needs no instruction: it ends in "#### N" by itself
)
