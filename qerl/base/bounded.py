"""Reading small files that others may have made, within limits of size and depth.

A file may be cut short, damaged, or made to do harm: a pipe that never ends, a sparse file of a terabyte, brackets that
nest deeper than Python's stack, a number that takes minutes to read. Each of these is a ValueError here, which the
readers of the single kinds of files turn into their own error.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

JSON_BYTES = 64 * 2**20  # the largest index of a published checkpoint has 9 MB, the largest tokenizer.json 35 MB
LINE_BYTES = 64 * 2**20  # of metrics and completions that a run or an evaluation wrote
DEPTH = 64  # lists and objects within one another; what is read here nests less than ten deep
DIGITS = 64  # of a whole number; transformers writes one of 31 where a tokenizer has no longest input


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file. Raises ValueError if it has more than `limit` bytes or is no regular file."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit or len(data := file.read(size + 1)) > limit:  # reading takes memory for all that is asked for
            raise ValueError(f"it has more than {limit} bytes, and no such file is that large")
        return data


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends. Raises ValueError for one of more than LINE_BYTES, and for what is no
    regular file."""
    with _open(path) as file:
        while line := file.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise ValueError(f"it has a line of more than {LINE_BYTES} bytes")
            yield line


def read_text(path: Path, limit: int) -> str:
    """The text of a file in UTF-8. Raises ValueError for what `read_bytes` refuses, and for other encodings."""
    return read_bytes(path, limit).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for no JSON, deep nesting, and whole numbers of absurd length."""
    try:
        value = json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, brackets)) > DEPTH and _is_deep(value):
        raise ValueError(f"it is nested more than {DEPTH} deep")
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, list | dict)]
        if not level:
            return False
    return True


def _open(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without this, opening a pipe waits for its writer
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise ValueError("it is no regular file")
    return file
