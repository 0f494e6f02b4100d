"""What stands around every command."""

import signal
from contextlib import suppress

import pytest

from qerl.errors import CheckpointError
from qerl.terminal import interrupts_counted, run_command


def test_an_error_of_many_lines_is_shown_as_one(capsys):
    def command(arguments, prog_name, standalone_mode):
        raise CheckpointError("the library said:\n\n\tfirst\n  second: write this instead")

    with pytest.raises(SystemExit) as stopped:
        run_command(command)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: the library said: first second: write this instead\n"


def test_an_interrupt_that_is_swallowed_while_libraries_load_counts():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_counted(), suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
