"""What stands around every command."""

import pytest

from qerl.errors import CheckpointError
from qerl.terminal import run_command


def test_an_error_of_many_lines_is_shown_as_one(capsys):
    def command(arguments, prog_name, standalone_mode):
        raise CheckpointError("the library said:\n\n\tfirst\n  second: write this instead")

    with pytest.raises(SystemExit) as stopped:
        run_command(command)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: the library said: first second: write this instead\n"
