"""The word game: find a word of a short alphabetical list. Rows are computed from (split, index), without any file.

The game is played against the environment `word_game` (qerl/episodes/build.py), which knows the row's answer
and says whether it comes before or after a guess. Which split a list of words belongs to is decided by a hash of it.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, Literal

Split = Literal["train", "test"]

THINGS = (
    "pens", "books", "cards", "coins", "stamps", "shells", "apples", "pears", "plums", "eggs",
    "cookies", "stickers", "balls", "beads", "stones", "nuts", "lemons", "candles", "buttons", "marbles",
)  # fmt: skip
TEST_SHARE = 0.1  # share of all possible questions that belong to the test split
WORDS = 7  # three guesses are always enough: the middle word, the middle of what is left, and the last one
TASK_ROWS = {"train": 4096, "test": 512}
QUESTION = "Find my word: {words}."


def split_of(question: str) -> Split:
    """The split that this question belongs to, decided by the hash of its words in lower case with single spaces."""
    digest = hashlib.sha256(" ".join(question.lower().split()).encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") < TEST_SHARE * 2**32 else "train"


def row(split: str, index: int) -> dict[str, Any]:
    """The row with this number: the first draw whose list of words belongs to `split`."""
    for attempt in range(10_000):
        rng = random.Random(f"word_game/{index}/{attempt}")
        words = sorted(rng.sample(THINGS, WORDS))
        question = QUESTION.format(words=", ".join(words))
        if split_of(question) == split:
            return {"id": f"word_game-{split}-{index}", "question": question, "answer": rng.choice(words)}
    raise AssertionError("10,000 draws without a list of this split")


def rows(split: str) -> Iterator[dict[str, Any]]:
    """All rows of a split, each list of words once."""
    seen: set[str] = set()
    for index in itertools.count():
        made = row(split, index)
        if made["question"] in seen:
            continue
        seen.add(made["question"])
        yield made
        if len(seen) == TASK_ROWS[split]:
            return
