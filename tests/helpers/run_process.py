"""`qerl` in a process of its own, with a real terminal or pipe. Processes are forked from one that has torch loaded."""

import multiprocessing
import os
import signal
import sys
import time
from contextlib import contextmanager
from multiprocessing.forkserver import ensure_running

import pytest

HELD_REWARD = '''
import time
from pathlib import Path

HERE = Path(__file__).parent

def digits(completions, step, **columns):
    """That of the small run; in step {step} it says so and waits for the file `go`."""
    if step == {step} and not (HERE / "go").exists():
        (HERE / "held").touch()
        while not (HERE / "go").exists():
            time.sleep(0.02)
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
'''


def hold_in(folder, step):
    """Let the small run that `folder` will have wait in the rewards after `step` steps, until `go(folder)`."""
    (folder / "reward.py").write_text(HELD_REWARD.replace("{step}", str(step + 1)))


def go(folder):
    (folder / "go").touch()


def forked(target, *arguments):
    """A started process that runs `target` of an importable module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with pytest.MonkeyPatch.context() as patch:  # without the helpers on its path, the server would preload nothing
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ensure_running()
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def run_cli(arguments, output, leads=False, on_hangup=signal.SIG_DFL):
    """The command line with stdout and stderr at the path `output`: that of a terminal, a fifo or a file."""
    import torch

    signal.signal(signal.SIGHUP, on_hangup)  # whatever the tests themselves were started under, nohup for example
    if leads:
        os.setsid()  # the terminal that is opened next becomes this process's own, which hangs up on it
    descriptor = os.open(output, os.O_RDWR if leads else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(3):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv = ["qerl", *arguments]
    torch.set_num_threads(1)
    from qerl.cli.main import main

    main()


def wait_for(reached, process, seconds=120):
    """Wait until `reached()`, while the process lives."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert process.is_alive(), f"it ended with {process.exitcode}"
        assert time.monotonic() < deadline, "it did not get there"
        time.sleep(0.02)


@contextmanager
def ended(process, seconds=120):
    """At the end of the block the process is waited for; if it hangs, it is killed."""
    try:
        yield process
        process.join(seconds)
        assert process.exitcode is not None, "it hangs"
    finally:
        process.kill()
        process.join()
