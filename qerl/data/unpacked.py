"""Limits on what a data file grows to when it is read.

A few megabytes of gzip or parquet can stand for terabytes. So a row may have ROW_BYTES, and what is unpacked a multiple
of the file's size and at most MOST_GIB; QERL_MAX_DATA_GIB sets another limit for a data set that really is that large.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from qerl.base.errors import DataError

VARIABLE = "QERL_MAX_DATA_GIB"
MOST_GIB = 4.0
ROW_BYTES = 16 * 2**20
COLUMNS = 1000
EXPANSION, SMALL = 50, 64 * 2**20  # text of questions and answers packs to a third or a tenth; up to SMALL all is read
LEAST_ROW = 256  # what a row counts at least, since an empty one takes time too


class Budget:
    """How much may still be unpacked from one file. `packed`: its format is one whose text grows without end."""

    def __init__(self, file: Path, packed: bool) -> None:
        self._file = file
        asked = _asked_gib()
        limit = (MOST_GIB if asked is None else asked) * 2**30
        if packed and asked is None:
            limit = min(limit, max(SMALL, EXPANSION * file.stat().st_size))
        self._limit = self.left = int(limit)

    def take(self, size: int) -> None:
        """Count a row of `size` bytes. Raises DataError if it or all rows together are too large."""
        if size > ROW_BYTES:
            raise DataError(
                f"{self._file} has a row of more than {ROW_BYTES >> 20} MiB, which is no question with its answer: "
                "leave that row out, or its large columns"
            )
        self.left -= max(size, LEAST_ROW)
        if self.left < 0:
            raise DataError(
                f"{self._file} grows to more than {self._limit / 2**30:.3g} GiB when it is unpacked, for which it is "
                f"damaged or made: unpack and look at it, or allow more with {VARIABLE}={_more(self._limit)}"
            )

    def check(self, size: int, what: str) -> None:
        """Raise DataError if `size` bytes, which the file says that it holds, are more than it may."""
        if size > self.left:
            raise DataError(
                f"{self._file} says that it holds {size / 2**30:.3g} GiB of {what}, and at most "
                f"{self._limit / 2**30:.3g} GiB are read: look at it, or allow more with {VARIABLE}={_more(size)}"
            )


def lines_of(text: TextIO, budget: Budget) -> Iterator[str]:
    """The lines of a text, each counted."""
    while line := text.readline(ROW_BYTES + 1):
        budget.take(len(line))
        yield line


def size_of(value: Any) -> int:
    """About the bytes that a value of a row takes."""
    if isinstance(value, str | bytes):
        return len(value) + 64
    if isinstance(value, dict):
        return 64 + sum(map(size_of, value.values()))
    return 64 + sum(map(size_of, value)) if isinstance(value, list | tuple) else 32


def _asked_gib() -> float | None:
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    try:
        asked = float(text)
    except ValueError:
        asked = 0.0
    if not 0 < asked < 2**20:
        raise DataError(f"{VARIABLE} is {text!r}: write a number of GiB above 0, such as {VARIABLE}=16")
    return asked


def _more(size: int) -> int:
    return int(2 * size / 2**30) + 1
