"""What every command of ours does around its work: log to stderr, and turn the user's errors into one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import typer

from qerl.errors import QerlError

NOISY_LOGGERS = ("httpx", "transformers", "trl", "accelerate", "compressed_tensors", "datasets", "urllib3")


def run_command(command: Callable[..., object], arguments: list[str] | None = None, name: str | None = None) -> None:
    """Call a typer app with `arguments` (None: sys.argv's).

    An error that is the user's to fix is one line on stderr and exit code 2, an interrupt exit code 130; anything else
    is a bug and keeps its traceback.
    """
    _set_up_logging()
    try:
        command(arguments, prog_name=name)
    except QerlError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")  # what a library said may have many lines
        sys.exit(2)
    except SystemExit as stop:
        if isinstance(stop.__context__, typer.Exit) and isinstance(stop.__context__.__cause__, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")  # typer exits without a word
        raise


def _set_up_logging() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its own logger ignores the level set below
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
