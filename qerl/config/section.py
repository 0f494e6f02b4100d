"""What the sections of a RunConfig have in common. Importing this loads pydantic and nothing heavier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema


class Section(BaseModel):
    """Frozen, no unknown keys, no conversion between types: `"8"` is not 8, and true is not 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


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
