"""Processes for code that is not ours: they end with the process that started them, and when they are late."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qerl.base.isolate import LateError, Process
from tests.helpers.processes import is_gone, until_gone

# Holds Python's lock for as long as it likes, so that no thread beside it runs.
BUSY = """
import re

def busy(completions, **columns):
    open(__file__ + ".begun", "w").close()
    return [bool(re.match("(a+)+$", "a" * 60 + "b"))]
"""
PARENT = """
import sys
from contextlib import suppress
from pathlib import Path
from qerl.base.own_function import Named, own_function
function = own_function(sys.argv[1], "busy", Named("reward", sys.argv[1], "x"), 300.0)
children = []
for task in Path("/proc/self/task").iterdir():
    with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
        children.append((task / "children").read_text())
print(*children, flush=True)
function(1, 300.0, completions=["a"])
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the states of processes from /proc")
def test_a_busy_process_does_not_outlive_a_killed_parent(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(BUSY)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, file], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        assert pids
        while not Path(f"{file}.begun").exists():
            time.sleep(0.02)
        assert not any(map(is_gone, pids))
        parent.kill()
        parent.wait()
        assert until_gone(pids)
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("size", [10, 4_000_000])  # what a connection takes at once, and more
def test_a_process_that_does_not_go_on_is_late_and_ended(monkeypatch, size):
    begun, begin = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: begun.append(begin(*given, **more)) or begun[-1])
    process = Process("renders prompts", "qerl.base.sandbox", ours=True)
    assert process.ask(b"{}", 60) == {}
    begun[0].send_signal(signal.SIGSTOP)
    with pytest.raises(LateError, match=r"did not return within 0\.2 s"):
        process.ask(json.dumps({"template": "a" * size}).encode(), 0.2)
    assert begun[0].wait(60) == -signal.SIGKILL
