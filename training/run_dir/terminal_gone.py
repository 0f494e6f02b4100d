"""A run goes on when its terminal is gone or the pipe that read it is closed (`| head`, a closed ssh).

What it would have shown from then on is appended to terminal.log in the run directory.
"""

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

TERMINAL_LOG = "terminal.log"


class LastingStream:
    """A text stream whose reader may disappear: at the first error, its file descriptor becomes `log`."""

    def __init__(self, stream: TextIO, log: Path) -> None:
        self._stream, self._log = stream, log
        self._moved = False

    def write(self, text: str) -> int:
        self._try(lambda: self._show(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: self._show(""))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _show(self, text: str) -> None:
        """Write without keeping anything back. A signal handler may ask for it in the middle of another write, which
        the stream refuses, and then drops what it holds."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except RuntimeError:
            self._show_at_once(text.encode(self._stream.encoding, "backslashreplace"))

    def _show_at_once(self, data: bytes) -> None:
        try:
            os.write(self._stream.fileno(), data)
        except BlockingIOError:
            raise
        except OSError:
            self._move()
            os.write(self._stream.fileno(), data)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BlockingIOError:  # a terminal that takes no more at the moment
            return
        except OSError:
            self._move()

    def _move(self) -> None:
        """Let whatever writes to the descriptor, this stream's own buffer included, write to the log."""
        if self._moved:
            return
        try:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, self._stream.fileno())
            os.close(descriptor)
            self._moved = True
            self._stream.flush()
        except (OSError, RuntimeError):
            return


@contextmanager
def terminal_may_go(run_dir: Path) -> Iterator[None]:
    """Within the block, no error of stdout or stderr reaches what writes to them."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    lasting = {
        name: LastingStream(stream, run_dir / TERMINAL_LOG) for name, stream in before.items() if _has_fd(stream)
    }
    moved = [
        (handler, handler.stream, lasting[name])
        for handler in _stream_handlers()
        for name in lasting
        if handler.stream is before[name]
    ]
    for name, stream in lasting.items():
        setattr(sys, name, stream)
    for handler, _, stream in moved:
        handler.setStream(stream)
    try:
        yield
    finally:
        for handler, stream, _ in moved:
            handler.setStream(stream)
        for name in lasting:
            setattr(sys, name, before[name])


def _has_fd(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.fileno() >= 0
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return False


def _stream_handlers() -> list[logging.StreamHandler]:
    """Of all loggers, since libraries have their own; not those that look sys.stderr up whenever they write."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = {handler for each in loggers for handler in getattr(each, "handlers", ())}
    return [each for each in handlers if isinstance(each, logging.StreamHandler) and "stream" in vars(each)]
