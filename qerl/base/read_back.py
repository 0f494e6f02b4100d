"""Read back the JSON that qerl wrote, and check it: a file that was edited or cut short is one clear error."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from qerl.base.errors import DataError
from qerl.base.files import JSON_BYTES, parse_json, read_lines, read_text

Row = dict[str, Any]


OF_EVALUATION = "give an evaluation whose files are as `qerl eval` wrote them"  # a remedy


SHOWN = 40  # characters of a value that an error shows


class Shape(BaseModel):
    """The fields that a JSON object must have; it may have more."""

    model_config = ConfigDict(extra="allow", strict=True)


def read_object(path: Path, shape: type[Shape], remedy: str) -> Row:
    """The object in a file. Raises DataError, which ends in `remedy`."""
    try:
        text = read_text(path, JSON_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): {remedy}") from error
    try:
        return _checked(text, shape)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({_reason(error)}): {remedy}") from error


def read_rows(path: Path, shape: type[Shape], remedy: str) -> list[Row]:
    """The objects in a file that has one per line. A last line that a kill cut short is left out. Raises DataError with
    the number of the first other line that does not have the shape; it ends in `remedy`."""
    rows = []
    try:
        for number, line in enumerate(read_lines(path), start=1):
            try:
                rows += [_checked(line.rstrip(b"\r\n").decode("utf-8"), shape)] if line.strip() else []
            except ValueError as error:
                if line.endswith(b"\n") or not isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                    raise DataError(f"line {number} of {path} is damaged ({_reason(error)}): {remedy}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): {remedy}") from error
    return rows


def _checked(text: str, shape: type[Shape]) -> Row:
    """The object in `text`. Raises ValueError, of which JSONDecodeError and ValidationError are subclasses."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    shape.model_validate(value)
    return value


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
    first = error.errors()[0]
    place, got = ".".join(map(str, first["loc"])), json.dumps(first["input"])
    shown = got if len(got) <= SHOWN else f"{got[: SHOWN - 3]}..."
    said = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    if first["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {shown}: {said}" if place else said
