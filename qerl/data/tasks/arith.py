"""Arithmetic word problems with worked answers, two to four steps of + - * on small numbers: rows that ship with qerl.

A script of commit 49887883 has made them. The embedded model was pretrained on other stories of the train
split, and no training ever sees the test split.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl.base.errors import DataError

SPLITS = ("train", "test")


def rows(split: str) -> Iterator[dict[str, Any]]:
    """All rows of a split, with the number that is the answer. Raises DataError for a split that does not exist."""
    for row in _read(split):
        answer = row["worked"].rpartition("#### ")[2]
        yield {"question": row["question"], "answer": answer, "id": row["id"], "kind": row["kind"]}


def solved(split: str) -> Iterator[dict[str, Any]]:
    """The same rows with the worked solution as their answer: one step per line, then "#### " and the number."""
    for row in _read(split):
        yield {"question": row["question"], "answer": row["worked"], "id": row["id"]}


def _read(split: str) -> Iterator[dict[str, str]]:
    if split not in SPLITS:
        raise DataError(f"task arith has no split {split!r}: write {' or '.join(map(repr, SPLITS))}")
    with gzip.open(Path(__file__).with_name(f"arith-{split}.jsonl.gz"), "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)
