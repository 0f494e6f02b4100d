"""Rows of Alpaca's form: what `instruction` asks may go on in the column `input`, and `output` is the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qerl.data.cells import is_empty
from qerl.data.messages import MessageError

INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
NOT_READ = ("history", "system")  # what LLaMA-Factory's rows may hold besides


def with_input(row: Mapping[str, Any], column: str, text: str, answer: str | None = None) -> str:
    """The text of a row's `column`, with its input below it if that is an instruction with one.

    `answer` is the column of answers. Raises MessageError for a row with more than the three columns.
    """
    if column != INSTRUCTION or INPUT not in row or answer == INPUT:
        return text
    if more := next((name for name in NOT_READ if not is_empty(row.get(name))), None):
        raise MessageError(
            f"an instruction with the column {more}",
            f"its column {more!r} would not be asked; write the row as `messages`, or remove the column",
        )
    if is_empty(row[INPUT]):
        return text
    if not isinstance(row[INPUT], str):
        raise MessageError("an input that is no text", f"its column 'input' is a {type(row[INPUT]).__name__}")
    return f"{text.strip()}\n\n{row[INPUT].strip()}"
