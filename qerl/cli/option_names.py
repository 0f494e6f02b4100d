"""Show the options of a command where the engine names keys of a recipe.

The engine speaks of `rollout.memory`, which is right while a recipe trains; `qerl eval` and `qerl chat` have --memory.
What is wrong in a recipe keeps its keys, since a run's config.yaml has them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import typer

from qerl.base.errors import CAP_GIB, ENGINE, KERNEL, MAX_NEW_TOKENS, MEMORY, Key, QerlError

ENGINE_OPTIONS = {  # what every command that opens an engine has
    MEMORY: "--memory",
    CAP_GIB: "--cap-gib",
    KERNEL: "--kernel",
    ENGINE: "--engine",
    MAX_NEW_TOKENS: "--max-new-tokens",
}

Gpu = Annotated[
    int | None,
    typer.Option(min=0, help="Card of this machine, as `qerl doctor` counts; default: that with the most free memory."),
]  # what every command that uses one card has


@contextmanager
def options_named(options: Mapping[Key, str]) -> Iterator[None]:
    """Within it, errors and log lines show `options` in place of the keys that they name."""

    def show(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(part.shown(options) if isinstance(part, Key) else part for part in record.args)
        return True

    handlers = logging.getLogger().handlers[:]
    for handler in handlers:
        handler.addFilter(show)
    try:
        yield
    except QerlError as error:
        error.options = options
        raise
    finally:
        for handler in handlers:
            handler.removeFilter(show)
