"""Text of others made fit to show: completions, names of files and models, answers of servers, errors of libraries.

Any of these may hold characters that a terminal obeys, or square brackets that rich takes for markup. Whatever qerl
prints passes through `printable`: logs and errors (qerl/cli/terminal.py), tables and displays (SafeConsole), and
the answers of a chat.
"""

import json
import logging
import re
from collections.abc import Iterator
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Characters that cannot be encoded or that a terminal obeys, and those that would reverse the direction of the text
# around them. Line feed and tab stay.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with a replacement character for each that a page or terminal could not show as it is."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))


def quoted(text: str) -> str:
    """`text` in double quotes, which Python and YAML read alike and JSON too unless it has unprintable characters.

    The result is one line of printable characters, so that it ends neither a comment nor a literal.
    """
    shown = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escape(ord(char)) for char in shown)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def in_comment(text: str) -> str:
    """`text` as it stands where it is one line of printable characters, else in quotes."""
    return text if text.isprintable() else quoted(text)


class SafeConsole(Console):
    """A console that reads no markup in what it prints, and shows control characters as replacement characters."""

    def __init__(self, stderr: bool = False, file: IO[str] | None = None) -> None:
        super().__init__(stderr=stderr, file=file, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _UNPRINTABLE.search(segment.text):
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class PrintableFormatter(logging.Formatter):
    """Formats a log record so that a terminal shows all of it as text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
