"""A lock, so that only one process at a time writes to a run directory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl.errors import ConfigError
from training.run_dir.checkpoint import checkpoints
from training.run_dir.folder import LOCK


def written(run_dir: Path) -> list[str]:
    """The names of the config and the checkpoints of a run. They change when another process writes to it."""
    return [path.name for path in (run_dir / "config.yaml", *checkpoints(run_dir)) if path.exists()]


@contextmanager
def only_writer(run_dir: Path, found: list[str]) -> Iterator[None]:
    """Make the run directory and lock it. The system releases the lock however the process ends.

    Raises ConfigError if the folder cannot be made, if another process holds it, or if `written` no longer gives what
    it gave before the model was loaded (`found`). The lock is a record lock, which forked children do not inherit, so
    that a grading worker that outlives a killed run does not hold it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = (run_dir / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be written ({error.strerror}): give another --out") from error
    with handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            busy = written(run_dir) != found
        except OSError:
            busy = True
        if busy:
            raise ConfigError(
                f"another process writes to {run_dir}: wait until it ends or stop it, then `qerl train --resume "
                f"{run_dir}`; or give another --out"
            )
        yield
