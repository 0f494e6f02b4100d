"""What a reward or a grader returned, as one finite number per completion."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Set
from itertools import islice
from typing import Any

LARGEST = 1e15  # the sum of the squares of a group's rewards still fits into float32
LONGEST = 300  # characters of an error that are shown

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class ReturnedError(Exception):
    """What a reward returned cannot be used: `what`, and the number of the completion, None for all of them."""

    def __init__(self, what: str, index: int | None = None) -> None:
        super().__init__(what)
        self.what, self.index = what, index


def numbers(returned: Any, expected: int) -> list[float]:
    """One number for each of `expected` completions. Raises ReturnedError.

    At most one value too many is taken, since a generator may have no end.
    """
    given = f"for {expected} completions"
    if isinstance(returned, Set):
        raise ReturnedError(f"returned a {type(returned).__name__}, which has no order, {given}: return a list instead")
    if isinstance(returned, str | bytes | Mapping):
        raise ReturnedError(f"returned {short(returned)} {given}")
    try:
        iterator = iter(returned)
    except TypeError:
        raise ReturnedError(f"returned {short(returned)} {given}") from None
    values = list(islice(iterator, expected + 1))
    if len(values) != expected:
        raise ReturnedError(f"returned {_count(returned, values, expected)} values {given}")
    return [_number(value, index) for index, value in enumerate(values)]


def _number(value: Any, index: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str | bytes) or not abs(number) <= LARGEST:
        raise ReturnedError(f"returned {short(value)}, which is not a finite number (of at most {LARGEST:g})", index)
    return number


def _count(returned: Any, values: list[Any], expected: int) -> str:
    try:
        return str(len(returned))
    except TypeError:
        return str(len(values)) if len(values) < expected else f"more than {expected}"


def short(value: Any) -> str:
    """The value as an error shows it, also if it cannot be shown."""
    try:
        return one_line(_SHORT.repr(value))
    except BaseException:
        return f"a {type(value).__name__}"


def one_line(value: object) -> str:
    """The text of a value in one line, without control characters, cut to LONGEST characters."""
    try:
        text = str(value)
    except BaseException as error:
        return f"(its text cannot be had: {type(error).__name__})"
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST]).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
