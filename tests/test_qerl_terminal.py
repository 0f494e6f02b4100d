"""What stands around every command."""

import signal
from contextlib import nullcontext, suppress

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


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["handled", "ignored"])
def handler(request):
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_is_swallowed_while_libraries_load_counts_unless_interrupts_are_ignored(handler):
    expected = nullcontext() if handler is signal.SIG_IGN else pytest.raises(KeyboardInterrupt)
    with expected, interrupts_counted(), suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler
