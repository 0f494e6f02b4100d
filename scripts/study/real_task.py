"""Word problems in one or two steps for a small real model, as rows, and their grading by the last number.

    python scripts/study/real_task.py OUT                      # OUT/train.jsonl, OUT/validation.jsonl, OUT/test.jsonl
    python scripts/study/real_task.py OUT --variant sparse

A row has a `question` and an `answer`, as `task: own` reads them: the question alone is the prompt. The function
`grade` of this file is the grader, so that this trains on the rows:

    qerl train --task own --data OUT/train.jsonl --grader scripts/study/real_task.py ...

`plain` has mostly problems in one step with small numbers, `sparse` problems in two steps with larger ones. Rows are
computed from the variant and their number. A hash of the question decides to which split it belongs: the splits share
stories and names, but no question.

What SmolLM2-135M-Instruct solves untrained (95% intervals):

    plain   greedy, 80 tokens, by vLLM on an H200: 80 of 512 (15.6%, 12.7 to 19.0%)
    sparse  temperature 1, 128 tokens, on a CPU: 4 of 192 (2.1%, 0.8 to 5.2%), 65% truncated

At temperature 1 it solves about 4% of the plain problems (the first steps of training).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    "Ava", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Liam", "Mia", "Noah",
    "Olive", "Paul", "Rosa", "Sam", "Tina", "Victor",
)  # fmt: skip
THINGS = (
    "apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "oranges", "pencils", "shells", "stamps",
    "stickers", "tickets", "toys",
)  # fmt: skip
MOST = 9999  # the largest answer
NUMBER = re.compile(r"(?:(?<![\w.])-)?\d+(?:,\d{3})*(?:\.\d+)?")

Story = tuple[str, Callable[[int, int, int, int], int]]  # a text, and its answer from a, b, c and d
ONE_STEP: tuple[Story, ...] = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", lambda a, b, c, d: a + b),
    ("{name} has {a} {things} and {other} has {b}. How many do they have together?", lambda a, b, c, d: a + b),
    ("{name} finds {a} {things} today and {b} tomorrow. How many is that in all?", lambda a, b, c, d: a + b),
    ("{name} has {a} {things} and gives {b} of them to {other}. How many are left?", lambda a, b, c, d: a - b),
    ("There are {a} {things} in a box. {name} takes out {b}. How many are still in it?", lambda a, b, c, d: a - b),
    ("{name} has {a} {things} and {other} has {b}. How many more does {name} have?", lambda a, b, c, d: a - b),
    ("{name} fills {c} boxes with {d} {things} each. How many {things} are that?", lambda a, b, c, d: c * d),
    ("One of the {things} costs {d} dollars. How many dollars do {c} of them cost?", lambda a, b, c, d: c * d),
    ("{name} shares {cd} {things} equally among {c} friends. How many does each get?", lambda a, b, c, d: d),
    ("{name} puts {cd} {things} into bags of {d}. How many bags are filled?", lambda a, b, c, d: c),
)
TWO_STEPS: tuple[Story, ...] = (
    (
        "{name} has {a} {things}, gets {b} more and gives {c} to {other}. How many are left?",
        lambda a, b, c, d: a + b - c,
    ),
    (
        "{name} has {c} bags with {d} {things} each and {a} more on the table. How many is that in all?",
        lambda a, b, c, d: c * d + a,
    ),
    ("{name} fills {c} boxes with {d} {things} each and sells {b}. How many are left?", lambda a, b, c, d: c * d - b),
    (
        "{name} has {a} {things}. {other} has {b} more than {name}. How many do they have together?",
        lambda a, b, c, d: 2 * a + b,
    ),
    (
        "{name} has {c} times as many {things} as {other}, who has {a}. How many do they have together?",
        lambda a, b, c, d: c * a + a,
    ),
    (
        "{name} had {a} {things}, lost {b} and then found {c} times what was left. How many has {name} found?",
        lambda a, b, c, d: c * (a - b),
    ),
)


@dataclass(frozen=True)
class Variant:
    """A mix of problems: the share of those in one step, and the ranges of the numbers, both ends included."""

    one_step: float
    terms: tuple[int, int]  # of a and b, of which a is the larger one
    factors: tuple[int, int]  # of c
    parts: tuple[int, int]  # of d


VARIANTS = {
    "plain": Variant(one_step=0.9, terms=(4, 25), factors=(2, 9), parts=(2, 12)),
    "sparse": Variant(one_step=0.0, terms=(4, 20), factors=(2, 5), parts=(3, 10)),
}
SPLITS = {"train": 4096, "validation": 256, "test": 512}  # rows
SHARES = {"test": 0.15, "validation": 0.1}  # of all questions; the others train


def split_of(question: str) -> str:
    """The split to which a question belongs."""
    place = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) / 2**64
    if place < SHARES["test"]:
        return "test"
    return "validation" if place < SHARES["test"] + SHARES["validation"] else "train"


def problems(variant: str) -> Iterator[dict[str, str]]:
    """Rows with `question` and `answer`, without end; a question may come more than once."""
    mix, rng = VARIANTS[variant], random.Random(f"real_task/{variant}")
    while True:
        stories = ONE_STEP if rng.random() < mix.one_step else TWO_STEPS
        text, answer = rng.choice(stories)
        name, other = rng.sample(NAMES, 2)
        b, a = sorted(rng.sample(range(mix.terms[0], mix.terms[1] + 1), 2))
        c, d = rng.randint(*mix.factors), rng.randint(*mix.parts)
        value = answer(a, b, c, d)
        if not 1 <= value <= MOST:
            continue
        words = {"name": name, "other": other, "things": rng.choice(THINGS)}
        yield {"question": text.format(**words, a=a, b=b, c=c, d=d, cd=c * d), "answer": str(value)}


def rows(variant: str, counts: dict[str, int] | None = None) -> dict[str, list[dict[str, str]]]:
    """The rows of each split, no question twice."""
    counts = counts or SPLITS
    found: dict[str, dict[str, str]] = {split: {} for split in counts}
    for row in problems(variant):
        split = split_of(row["question"])
        if len(found[split]) < counts[split]:
            found[split].setdefault(row["question"], row["answer"])
        elif all(len(found[name]) == counts[name] for name in counts):
            break
    return {
        split: [{"question": question, "answer": answer} for question, answer in of_split.items()]
        for split, of_split in found.items()
    }


def grade(completion: str, answer: str) -> bool:
    """Whether the last number of the completion is the answer; "1,234" and "12.0" are numbers, too."""
    numbers = NUMBER.findall(completion)
    return bool(numbers) and float(numbers[-1].replace(",", "")) == float(answer)


def write(out: Path, variant: str, counts: dict[str, int] | None = None) -> dict[str, Path]:
    """Write the rows of each split as `out`/SPLIT.jsonl; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, of_split in rows(variant, counts).items():
        files[split] = out / f"{split}.jsonl"
        files[split].write_text("".join(json.dumps(row) + "\n" for row in of_split), encoding="utf-8")
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the rows")
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    args = parser.parse_args()
    for file in write(args.out, args.variant).values():
        print(file)


if __name__ == "__main__":
    main()
