"""Turns of several processes that measure on one card, so that whatever happens on the machine affects all of them."""

from __future__ import annotations

import argparse
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = ".part"  # suffix of the file on which a process holds a lock while it takes part in turns


@contextmanager
def turns_left_to_others(arguments: argparse.Namespace) -> Iterator[None]:
    """Take part in turns from here on, by holding a lock on a file.

    The lock ends with the block or with the process, and then nobody waits for this engine any more.
    """
    if arguments.turns is None or arguments.open_only:
        yield
        return
    arguments.turns.mkdir(parents=True, exist_ok=True)
    unlocked = arguments.turns / f"{os.getpid()}.begins"
    with unlocked.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(unlocked.with_suffix(PART))
        yield


@contextmanager
def turn(folder: Path | None, parties: int, name: str) -> Iterator[None]:
    """Wait until all `parties` processes that share `folder` have reached the turn `name` or are gone.

    Then the block runs in one process at a time.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.{name}").touch()
    while _came_or_gone(folder, name) < parties:
        time.sleep(0.02)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _came_or_gone(folder: Path, name: str) -> int:
    """How many of the processes in `folder` have reached the turn `name` or are gone."""
    came = {path.stem for path in folder.glob(f"*.{name}")}
    return len(came | {path.stem for path in folder.glob(f"*{PART}") if path.stem not in came and _left(path)})


def _left(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
