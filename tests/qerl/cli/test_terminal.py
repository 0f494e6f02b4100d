"""What all commands have in common: errors, interrupts and full disks."""

import resource
import signal
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from safetensors.torch import save_file

from qerl.base.errors import CheckpointError
from qerl.base.files import replace_text
from qerl.cli.terminal import interrupts_counted, run_command


def test_an_error_of_many_lines_is_shown_in_one_line(capsys):
    def command(arguments, prog_name, standalone_mode):
        raise CheckpointError("the library said:\n\n\tfirst\n  second: write this instead")

    with pytest.raises(SystemExit) as stopped:
        run_command(command)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: the library said: first second: write this instead\n"


@contextmanager
def full_disk():
    """Files may not grow to even one byte, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("text"),
        lambda path: replace_text(path, "text"),
        lambda path: save_file({"a": torch.ones(3)}, path),
    ],
    ids=["text", "whole text", "safetensors"],
)
def test_a_full_disk_gives_one_line(tmp_path, capsys, write):
    with full_disk(), pytest.raises(SystemExit) as stopped:
        run_command(lambda *args, **options: write(tmp_path / "file"))
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: the disk takes no more (File too large): free some space")
    assert line.count("\n") == 1
    assert not list(tmp_path.glob("*.partial"))


def test_other_errors_of_the_system_keep_their_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        run_command(lambda *args, **options: (tmp_path / "none").read_text())


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["handled", "ignored"])
def handler(request):
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_a_library_swallows_while_it_loads_still_counts_unless_interrupts_are_ignored(handler):
    expected = nullcontext() if handler is signal.SIG_IGN else pytest.raises(KeyboardInterrupt)
    with expected, interrupts_counted(), suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler
