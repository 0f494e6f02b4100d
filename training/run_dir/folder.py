"""The folder of a run: where a new one may be, who writes to it, and where it keeps what it replaces. No torch.

One process at a time writes to a run directory. It holds a lock that the system releases however the process ends.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.base.files import expanded
from qerl.base.program import ROWS
from qerl.base.read_back import read_object
from qerl.checkpoint.base_start import START
from qerl.checkpoint.folder import BASE
from qerl.report.read import FINISHED, HELD, LOCK, RUNNING, STOPPED, About, has_result
from training.run_dir.checkpoint import checkpoints
from training.run_dir.terminal_gone import TERMINAL_LOG

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel

IDS = ".trackers.json"  # in the run directory: by which a resumed run continues at a tracker
REFUSED = (ConfigError, CheckpointError, DataError)  # what was given is wrong, as against a failure here
LONGEST = 300  # characters that are noted of an error
# What may be there if a kill, a full disk or a tracker that failed came before config.yaml.
UNBEGUN = {LOCK, "config.partial", TERMINAL_LOG, IDS, "wandb", "swanlab", "tensorboard"}
UNBEGUN |= {BASE, f".{BASE}.partial", START, f".{START}.partial"}
GIVEN = re.compile(rf"{Path(ROWS).stem}(-.*)?\.(jsonl|partial)")  # rows that a program gave, also of several sources


def new_run_dir(out: str | None, name: str) -> Path:
    """The folder of a new run: `out`, else `runs/<name>-<time>`. Raises ConfigError if it cannot be made."""
    run_dir = expanded(out or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if not str(run_dir).isprintable():
        raise ConfigError(f"--out {str(run_dir)!r} holds characters that cannot be printed: write another")
    try:
        taken = run_dir.exists() and (
            not run_dir.is_dir()
            or not all(path.name in UNBEGUN or GIVEN.fullmatch(path.name) for path in run_dir.iterdir())
        )
        above = next(parent for parent in run_dir.absolute().parents if parent.exists())
    except OSError as error:
        raise ConfigError(f"--out {run_dir} cannot be a run directory ({error.strerror}): give another") from error
    if taken:
        if not os.path.isfile(run_dir / "config.yaml"):
            raise ConfigError(f"{run_dir} already exists and is no run: give another --out")
        raise ConfigError(
            f"{run_dir} already exists: continue it with `qerl train --resume {run_dir}`, or give another --out"
        )
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "may not be written" if above.is_dir() else "is a file"
        raise ConfigError(f"--out {run_dir} cannot be made: {above} {what}; give another --out")
    return run_dir


def check_shared(run_dir: Path, parallel: Parallel) -> None:
    """Raise ConfigError unless all ranks see the same folder, as ranks on hosts without a shared file system do not."""
    if parallel.size == 1:
        return
    mark = run_dir / parallel.broadcast(f"{LOCK}.{os.getpid()}.{time.time_ns()}")
    if parallel.first:
        run_dir.mkdir(parents=True, exist_ok=True)
        mark.touch()
    parallel.barrier()
    seen = parallel.gather(mark.exists())
    if parallel.first:
        mark.unlink()
    if not all(seen):
        raise ConfigError(
            f"rank {seen.index(False)} does not see {run_dir}, where rank 0 writes and all ranks of a run that trains "
            "whole weights read: give an --out on a file system that all hosts share"
        )


def read_about(run_dir: Path) -> dict[str, Any]:
    """The content of run.json; {} if there is none. Raises DataError if it is damaged."""
    path = run_dir / "run.json"
    if not path.is_file():
        return {}
    return read_object(path, About, f"delete it, and `qerl train --resume {run_dir}` writes another")


def make_aside(run_dir: Path) -> Path:
    """Make a folder `replaced-<time>` in the run, for what would be overwritten."""
    name = f"replaced-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    aside = next(run_dir / each for each in names if not (run_dir / each).exists())
    aside.mkdir()
    return aside


def written(run_dir: Path) -> list[str]:
    """The names of the config and the checkpoints of a run. They change when another process writes to it."""
    return [path.name for path in (run_dir / "config.yaml", *checkpoints(run_dir)) if path.exists()]


@contextmanager
def only_writer(run_dir: Path, found: list[str]) -> Iterator[None]:
    """Make the run directory and hold its lock.

    Raises ConfigError if the folder cannot be made, if another process holds it, or if `written` no longer gives what
    it gave before the run was checked (`found`). The lock is a record lock, which forked children do not inherit, so
    that a grading worker that outlives a killed run does not hold it. Input that is refused in the block before
    anything is written leaves nothing; a run that fails, as an engine that does not fit, says so in its lock.
    """
    made = not run_dir.exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = (run_dir / LOCK).open("a")
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be written ({error.strerror}): give another --out") from error
    with handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = not os.fstat(handle.fileno()).st_nlink  # a run that was refused has just taken it away
            busy = gone or written(run_dir) != found
        except OSError:
            busy = True
        if busy:
            raise ConfigError(
                f"another process writes to {run_dir}: wait until it ends or stop it, then `qerl train --resume "
                f"{run_dir}`; or give another --out"
            )
        _note(handle, f"{RUNNING} {socket.gethostname()}")
        HELD.add(held := (run_dir / LOCK).resolve())
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            _note(handle, STOPPED)
            raise
        except BaseException as error:
            if isinstance(error, REFUSED) and {path.name for path in run_dir.glob("*")} <= {LOCK}:
                _take_away(run_dir, made)
            else:
                _note(handle, f"failed: {str(error) or type(error).__name__}")
            raise
        finally:
            HELD.discard(held)
        _note(handle, FINISHED if has_result(run_dir) else STOPPED)


def _take_away(run_dir: Path, made: bool) -> None:
    """Delete the lock of a run that has nothing else, and the folder if it was made for it."""
    with suppress(OSError):
        (run_dir / LOCK).unlink()
        if made:
            run_dir.rmdir()


def _note(lock: TextIO, text: str) -> None:
    """Let the lock's file say where the run is; a killed one leaves it at RUNNING, a full disk empty."""
    with suppress(OSError):
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), " ".join(text.split())[:LONGEST].encode(errors="replace"))
