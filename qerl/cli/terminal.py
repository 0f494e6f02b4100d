"""What every command does around its work: it logs to stderr, and shows errors that the user can fix as one line."""

import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import typer
from typer.exceptions import TyperException

from qerl.base.errors import QerlError
from qerl.base.files import refusal_of
from qerl.base.printable import PrintableFormatter, printable

NOISY_LOGGERS = ("httpx", "transformers", "trl", "accelerate", "compressed_tensors", "datasets", "urllib3")


def run_command(command: Callable[..., object], arguments: list[str] | None = None, name: str | None = None) -> None:
    """Call a typer app with `arguments` (None: sys.argv's), and exit.

    An error that the user can fix is shown as one line on stderr and gives exit code 2; an interrupt gives 130. All
    else is a bug and keeps its traceback.
    """
    _set_up_logging()
    try:
        code = command(arguments, prog_name=name, standalone_mode=False)
    except QerlError as error:
        _refuse(str(error))
    except TyperException as error:
        _refuse_usage(error, sys.argv[1:] if arguments is None else arguments)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        if (said := refusal_of(error)) is None:
            raise
        _refuse(
            f"the disk takes no more ({said}): free some space, or write to another disk with --out, then run the same "
            "command again; a run that has begun continues with `qerl train --resume`"
        )
    except KeyboardInterrupt:
        code = 130
    if code == 130:  # typer turns an interrupt into this code
        sys.stderr.write("interrupted\n")
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def interrupts_counted() -> Iterator[None]:
    """Raise at the end an interrupt that a library swallowed, such as one in a callback while it was imported."""
    found: list[int] = []

    def interrupt(number: int, frame: object) -> NoReturn:
        found.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield  # a shell starts background jobs so, and a thread can set no handler
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if found:
        raise KeyboardInterrupt


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"error: {printable(' '.join(message.split()))}\n")  # a library's message may have many lines
    sys.exit(2)


def _refuse_usage(error: Any, arguments: Sequence[str]) -> NoReturn:
    """Show in one line a wrong use of the command line that typer found, and where to read about the command."""
    context, options = getattr(error, "ctx", None), getattr(error, "possibilities", None)
    message = error.message if options else error.format_message()
    if message.startswith("Usage:"):  # a command without arguments shows its help
        sys.stderr.write(f"{message}\n")
        sys.exit(2)
    message = message.partition(". Did you mean")[0].rstrip(".?")
    message = message.replace("Value error, ", "").replace("Input should", "should")  # pydantic's words
    if (advice := _advice(error, message, arguments)) is not None:
        message += f"; {advice}"
    value = _value_of(getattr(error, "param", None), arguments)
    got = "" if value is None or repr(value) in message else f" (got {value!r})"
    command = context.command_path if context is not None else "qerl"
    _refuse(f"{message[0].lower()}{message[1:]}{got}: see `{command} --help`")


def _advice(error: Any, message: str, arguments: Sequence[str]) -> str | None:
    """What to write instead, as the command's own options and arguments and the keys of a recipe tell it."""
    from qerl.config.keys import field_at, is_list, nearest, nearest_key

    if (context := getattr(error, "ctx", None)) is None:
        return None
    parameters = context.command.params
    keyed = any("--set" in each.opts for each in parameters)
    if (option := getattr(error, "option_name", None)) is not None:
        close = nearest(option, list(error.possibilities or ()), 0.8)
        key = nearest_key((option.lstrip("-").replace("-", "_"),)) if keyed and close is None else None
        if key is not None and ("." in key or is_list(field_at((key,)))):
            return f"write --set {key}={next((value for name, value in _pairs(arguments) if name == option), 'VALUE')}"
        close = close or nearest(option, list(error.possibilities or ()), 0.7)
        return close and f"did you mean {close}"
    if extra := re.search(r"unexpected extra arguments? \((\S+).*\)", message.replace("(s)", "")):
        name, equals, value = extra[1].partition("=")
        if keyed and equals:
            return f"write --set {nearest_key(tuple(name.split('.'))) or name}={value}"
        valued = [each for each in parameters if each.opts[0].startswith("-") and not getattr(each, "is_flag", False)]
        if valued and not {"--out", *arguments} & set(valued[0].opts):
            return f"did you mean {valued[0].opts[0]} {extra[1]}"
    if unknown := re.search(r"such command '(.*)'", message):
        close = nearest(unknown[1], list(context.command.commands), 0.65)
        return f"did you mean '{close}'" if close else f"there are {', '.join(context.command.commands)}"
    if message.startswith("Missing"):
        names = [each.opts[0] for each in parameters if each.required]
        words = [f"{name} {name[2:].upper()}" if name.startswith("-") else name.upper() for name in names]
        return f"write `{' '.join([context.command_path, *words])}`"
    return None


def _pairs(arguments: Sequence[str]) -> list[Sequence[str]]:
    """Each typed word with what follows it, behind `=` or as the next word."""
    return [*(word.split("=", 1) for word in arguments if "=" in word), *pairwise(arguments)]


def _value_of(parameter: Any, arguments: Sequence[str]) -> str | None:
    """The value that was typed last for an option; None if the option was not typed."""
    options = [option for option in getattr(parameter, "opts", ()) if option.startswith("-")]
    return next((value for option, value in reversed(_pairs(arguments)) if option in options), None)


def quiet_libraries_() -> None:
    """Let libraries show neither what concerns only their developers nor bars where there is no terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its own logger ignores the level set below
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # llm-compressor's bars would fill a pipe
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _set_up_logging() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of another encoding than UTF-8
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    quiet_libraries_()
