"""What the rules of a recipe share: choices by name, and conflicts between keys.

A text of a configuration that is one of names which are known only when it is checked: those of a registry.

What a rule of `qerl/config/rules.py` yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema


@dataclass(frozen=True)
class OneOf:
    """Metadata of an annotated str: `names()` gives what is allowed, and the error is the one that Literal has."""

    names: Callable[[], Sequence[str]]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: object) -> object:
        names = self.names()
        if value not in names:
            expected = " or ".join(repr(name) for name in names)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value


class Conflict(ValueError):
    """An impossible combination. `values` maps dotted keys to their values; the error names the first one's line."""

    def __init__(self, values: dict[str, object], why: str, write: str) -> None:
        self.keys = tuple(values)
        super().__init__(
            f"{' with '.join(f'{key} {_word(value)}' for key, value in values.items())}: {why}; write {write}"
        )


Conflicts = Iterator[Conflict]


def _word(value: object) -> str:
    """A value in YAML's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and " " in value else str(value)
