"""Whether a command line would be accepted: it is parsed as typed, and nothing runs."""

import shlex
from functools import cache

import typer

from qerl.cli.main import app
from qerl.cli.train import with_resume_value


@cache
def whole():
    return typer.main.get_command(app)


def split_command(command):
    """The words of `qerl ...` without the program."""
    program, *words = shlex.split(command, comments=True)
    assert program == "qerl"
    return words


def check_parses(command):
    """Parse `qerl ...`. Raises click's usage error where the command line does not take it."""
    words = split_command(command)
    if words == ["--help"]:
        return
    words = with_resume_value(words)
    here = whole()
    context = here.make_context("qerl", [words[0]], resilient_parsing=True)
    while hasattr(here, "commands"):
        if not words:
            return  # a group that runs by itself, such as `qerl recipes`
        name, here, words = here.resolve_command(context, words)
    here.make_context(name, words, parent=context)
