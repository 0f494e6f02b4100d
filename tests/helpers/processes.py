"""Whether processes are still there, as /proc says."""

import time
from pathlib import Path


def is_gone(pid):
    """Whether a process has ended; nobody may be there to take its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until_gone(pids, seconds=10):
    """Wait for processes to end; whether they did."""
    deadline = time.monotonic() + seconds
    while not all(map(is_gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return all(map(is_gone, pids))
