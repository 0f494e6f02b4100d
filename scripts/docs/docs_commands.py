"""The page of commands: every command of `qerl` with its options, read from the command line itself."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import typer

from qerl.cli.main import app


def commands_page() -> str:
    """A section for each command: what it does, how it is called, and its options as a list."""
    return "\n".join(line for name, command in all_commands() for line in _section(name, command)) + "\n"


def all_commands() -> Iterator[tuple[str, Any]]:
    """(words after `qerl`, command), those of a group after the group."""
    for name, command in typer.main.get_command(app).commands.items():
        yield name, command
        for below, inner in getattr(command, "commands", {}).items():
            yield f"{name} {below}", inner


def _section(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(f"qerl {name}", [], resilient_parsing=True)
    usage = " ".join([f"qerl {name}", *command.collect_usage_pieces(context)])
    yield from ("", f"## qerl {name}", "", _text(command.help or command.short_help or ""), "")
    yield from ("``` { .text .no-copy }", usage, "```", "")
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield f"- <code>{_text(record[0])}</code>" + (f": {_text(record[1])}" if record[1] else "")


def _text(words: str) -> str:
    """The words in one paragraph of HTML in which nothing is markup."""
    escaped = html.escape(" ".join(words.split()), quote=False)
    for character in "\\`*_[]{}":
        escaped = escaped.replace(character, f"&#{ord(character)};")
    return re.sub("&#96;(.+?)&#96;", r"<code>\1</code>", escaped)
