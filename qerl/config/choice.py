"""A text of a configuration that is one of names which are known only when it is checked: those of a registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
