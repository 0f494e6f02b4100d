"""Rows of a file, task or hub data set, cut into sequences of equal length to calibrate on, and others to measure on.

Rows are shuffled with a fixed seed, rendered with the model's chat template, joined, and cut every `sequence_length`
tokens. So `256 x 2048` is that many tokens however long the rows are, and no padding enters the statistics. The first
rows are held out for the measurement, so that they do not depend on how many others are used.

The rows that ship with qerl (`mixed`, see rows/README.md) are not shuffled: their three kinds take turns in the file,
so that what is held out and what is used are mixed, however few they are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import DataError
from qerl.data.rows import local_rows
from qerl.data.sequences import fields_of, shuffled_rows, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 16  # sequences to measure on
MIXED = "mixed"  # the name of the rows that ship with qerl; a file or folder of that name is ./mixed
OWN_TASK = "arith"  # what the embedded models were trained on
REAL_TOKENS = 1000  # of a tokenizer that spells text; the embedded models' have under 700

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """Token sequences of one length, and what they were made of."""

    data: str
    sequences: list[list[int]]  # to calibrate on
    rows: int  # that were used
    unusable_rows: int
    held_out: list[list[int]] = field(default_factory=list)  # to measure on, from other rows

    @property
    def measured(self) -> list[list[int]]:
        """The sequences to measure on: those held out, or if there are none the calibration's."""
        return self.held_out or self.sequences

    def summary(self) -> dict:
        """The entry of quantize_report.json."""
        length = len((self.sequences or self.held_out)[0])
        return {
            "data": self.data,
            "sequences": len(self.sequences),
            "sequence_length": length,
            "tokens": len(self.sequences) * length,
            "rows": self.rows,
            "unusable_rows": self.unusable_rows,
        }


def shipped_rows() -> Path:
    """The file of the calibration rows that ship with qerl."""
    return Path(__file__).with_name("rows") / "mixed.jsonl.gz"


def load_calibration(
    data: str, tokenizer: PreTrainedTokenizerBase, size: int, sequence_length: int, held_out: int = 0
) -> Calibration:
    """Up to `size` sequences of `sequence_length` tokens from `data` (a file, a task, a hub id, or `mixed`).

    Up to `held_out` more come from other rows; if there are few rows, an eighth of all sequences, or none of one.
    Raises DataError if the data cannot be read, has no usable row, or too few tokens for one sequence.
    """
    rows: list[list[int]] = []
    held: list[int] = []
    tokens: list[int] = []
    unusable = 0
    example: Any = None
    for row in _rows(data):
        if not (ids := tokens_of(row, tokenizer)):
            unusable, example = unusable + 1, row
            continue
        rows.append(ids)
        part = held if len(held) < held_out * sequence_length else tokens
        part += ids
        if len(tokens) >= size * sequence_length and len(held) >= held_out * sequence_length:
            break
    _check_tokens(data, rows, sequence_length, (unusable, example))
    if held_out and len(tokens) < size * sequence_length:
        held, tokens = _few_rows(rows, held_out, sequence_length)
    sequences = _cut(tokens, size, sequence_length)
    if len(sequences) < size and data != MIXED:  # nobody chose how many of those there are
        found = len(sequences)
        logger.warning("%s is enough for %d sequences of %d tokens, not for %d", data, found, sequence_length, size)
    if unusable:
        logger.warning("%s: %d rows have no usable text (fields of one: %s)", data, unusable, fields_of(example))
    return Calibration(data, sequences, len(rows), unusable, _cut(held, held_out, sequence_length))


def _rows(data: str) -> list[Any]:
    """The rows in the order in which they are used."""
    if data == MIXED:
        return [row for _, row in local_rows(str(shipped_rows()), "train")]
    return shuffled_rows(data, "--calibration")


def _check_tokens(data: str, rows: list[list[int]], sequence_length: int, unusable: tuple[int, Any]) -> None:
    """Raise DataError unless the rows are enough for one sequence."""
    count, example = unusable
    if not rows:
        raise DataError(
            f"{data}: none of {count} rows can be used for calibration (fields of one: {fields_of(example)}): a row "
            "needs `messages`, `text`, or a question with an answer"
        )
    tokens = sum(map(len, rows))
    if tokens < sequence_length:
        raise DataError(
            f"{data} gives {tokens} tokens from {len(rows)} rows, less than one sequence of {sequence_length}: give "
            f"more rows, or write --sequence-length {tokens} or less"
        )


def _few_rows(rows: list[list[int]], held_out: int, sequence_length: int) -> tuple[list[int], list[int]]:
    """The tokens to hold out and those to use, of rows that are fewer than was asked for."""
    there = sum(map(len, rows)) // sequence_length
    wanted = min(held_out, max(1, there // 8)) if there > 1 else 0
    held: list[int] = []
    tokens: list[int] = []
    for ids in rows:
        part = held if len(held) < wanted * sequence_length else tokens
        part += ids
    if len(tokens) < sequence_length:  # one long row
        return [], [token for ids in rows for token in ids]
    return held, tokens


def _cut(tokens: list[int], size: int, length: int) -> list[list[int]]:
    return [tokens[start : start + length] for start in range(0, min(size, len(tokens) // length) * length, length)]
