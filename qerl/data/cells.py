"""The cells of a row: which of them are empty, in all the ways in which files and data frames write that."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

NOT_AVAILABLE = ("nan", "<na>", "nat")  # what pandas writes for an empty cell whose column it turns into text
_PANDAS = ("NAType", "NaTType")


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing: None, NaN, pandas' NA, white space, their names as text, an empty list or object.

    "NA", "None" and "null" are words that may be meant, so they are not empty.
    """
    if value is None or type(value).__name__ in _PANDAS:
        return True
    if isinstance(value, str):
        text = value.strip()
        return not text or text.casefold() in NOT_AVAILABLE
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, Mapping | list | tuple):
        return not value
    return isinstance(value, float) and value != value


def without_nulls(value: Any) -> Any:
    """The value without the keys of objects that are null: parquet gives each object the keys of all others."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list | tuple) else value
