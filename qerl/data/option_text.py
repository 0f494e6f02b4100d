"""Options of commands that are typed as text: columns, names and variables of a chat template."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qerl.base.errors import ConfigError
from qerl.config.yaml_text import YamlError, parse


@dataclass(frozen=True)
class Text:
    """Marks a field that is typed as text, which `read` turns into its value."""

    read: Callable[[str], Any]


def parse_columns(text: str) -> dict[str, str]:
    """`question=problem,answer=solution` as a dictionary. Raises ConfigError for anything else."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and column.strip() for name, _, column in pairs):
        raise ConfigError(f"--columns {text!r} is not of the form name=column: write question=problem,answer=solution")
    columns = {name.strip(): column.strip() for name, _, column in pairs}
    if len(columns) < len(pairs):
        raise ConfigError(f"--columns {text!r} maps one name to two columns: write question=problem,answer=solution")
    return columns


def parse_switches(text: str) -> dict[str, Any]:
    """`enable_thinking=false,level=2` as variables of a chat template, whose values are YAML. Raises ConfigError."""
    found: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (each.strip() for each in part.partition("="))
        try:
            found[name] = parse(value).data
        except YamlError as error:
            raise ConfigError(f"--chat-template-kwargs {part}: {error}; write {name}=false") from None
        if not equals or not value or not name.isidentifier():
            raise ConfigError(f"--chat-template-kwargs {part!r} is not NAME=VALUE: write enable_thinking=false")
    return found


def parse_names(text: str) -> tuple[str, ...]:
    """`a,b` as names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def task_values(incomplete: str) -> list[str]:
    from qerl.data.tasks import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]
