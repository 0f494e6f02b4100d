"""Longer arithmetic word problems: an opening, two to four events, MIN_STEPS to MAX_STEPS steps of + - * / up to 999.

Like those of task arith, they are computed from (split, seed, index) without any file or download, and the same rule
separates the splits. But the stories are composed of the parts in qerl/data/tasks/arith_chain_parts.py, some sentences
change nothing, and results have up to three digits. A model of 20 M parameters that reads and calculates well solves
them; the embedded one does not. scripts/models/pretrain_arith.py makes a model for this task.

    >>> problem("train", seed=0, index=0).worked  # one step per line, then "#### " and the answer
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from qerl.base.errors import DataError
from qerl.data.tasks import Task
from qerl.data.tasks.arith import Problem, Split, draw_words, split_of
from qerl.data.tasks.arith_chain_parts import EVENTS, OPENINGS, QUESTIONS, Part

MAX_RESULT = 999
MIN_STEPS, MAX_STEPS = 3, 7
EVENT_COUNTS = (2, 3, 4)
DRAWS_OF_NUMBERS = 8  # for one part, before another part is drawn
TASK_SEED = 0
TASK_ROWS = {"train": 16384, "test": 2048}


def problem(split: Split, seed: int, index: int) -> Problem:
    """The problem with this number: the first draw from (seed, index) whose question belongs to `split`.

    Its kind is the name of its opening. Raises DataError for a split that does not exist.
    """
    _known(split)
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
        raise DataError(f"task arith_chain has no split {split!r}: write {' or '.join(map(repr, TASK_ROWS))}")
    return split


TASK = Task(
    name="arith_chain",
    hub=None,
    splits={"train": "train", "test": "test"},
    answer_kind="number",
    generate=rows,
    solved=solved,
    prompt_template="{question}",  # the model made for this task needs no instruction
)
