"""What a rule of a recipe yields: a conflict between keys."""

from __future__ import annotations

from collections.abc import Iterator


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
