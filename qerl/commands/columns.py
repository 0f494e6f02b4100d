"""`--columns`, as several commands have it."""

from __future__ import annotations

from qerl.errors import ConfigError


def parse_columns(text: str) -> dict[str, str]:
    """`question=problem,answer=solution` as a dictionary. Raises ConfigError for anything else."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and column.strip() for name, _, column in pairs):
        raise ConfigError(f"--columns {text!r} is not of the form name=column: write question=problem,answer=solution")
    columns = {name.strip(): column.strip() for name, _, column in pairs}
    if len(columns) < len(pairs):
        raise ConfigError(f"--columns {text!r} maps one name to two columns: write question=problem,answer=solution")
    return columns
