"""The output folder: check it before long work, write it next to its final place, and move it there as a whole.

While it is being written it is the hidden sibling folder `.<name>.partial`. Its writer holds a flock on it, which the
kernel releases if the process is killed. The next run with the same output clears what a killed one left behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from qerl.base.disk import fsync
from qerl.base.errors import CheckpointError
from qerl.checkpoint.base_start import START
from qerl.checkpoint.links import TEMPLATES
from qerl.checkpoint.quantized_folder import REPORT
from qerl.checkpoint.sealed import CHECKSUMS
from qerl.checkpoint.shards import INDEX, read_json
from qerl.checkpoint.writer import SMALL_FILES

MERGE_REPORT, EXPORT_REPORT = "merge_report.json", "export_report.json"
REPORTS = (REPORT, MERGE_REPORT, EXPORT_REPORT)
SPARE_BYTES = 64 * 2**20  # for tokenizer, config, report, and the file system's own needs
WRITTEN = (
    *("config.json", "adapter_config.json", "*.safetensors", INDEX, "README.md", REPORT, MERGE_REPORT),
    *(EXPORT_REPORT, CHECKSUMS),
    *(*SMALL_FILES, "*.py"),
)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # renameat2(2)


def check_target(out: Path, source: Path, overwrite: bool, force: bool = False) -> None:
    """Raise CheckpointError if `out` must not be written: it exists, or overlaps the source.

    `overwrite` allows to replace a folder that holds nothing but what qerl wrote, `force` one that holds other files,
    but never the current folder, the home folder, or one above them.
    """
    try:
        out.is_file()
    except OSError as error:  # we may not enter a folder above it
        raise CheckpointError(f"{out} cannot be written ({error.strerror}): give another folder as --out") from error
    inside = out.resolve(), source.resolve()
    if inside[0] == inside[1] or inside[0] in inside[1].parents or inside[1] in inside[0].parents:
        raise CheckpointError(f"--out {out} is, holds or lies in the model's own folder {source}: write elsewhere")
    if out.is_file():
        raise CheckpointError(f"--out {out} is a file: give a folder that does not exist yet")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite and not force:
        raise CheckpointError(f"{out} exists: write `--overwrite` to replace it, or another folder as --out")
    if any(inside[0] in (place, *place.parents) for place in (Path.cwd(), Path.home().resolve())):
        raise CheckpointError(f"--out {out} holds the current or the home folder: give another folder as --out")
    if not force and (foreign := _not_ours(out)):
        raise CheckpointError(
            f"{out} holds something else than a model that qerl made ({foreign}), and --overwrite would delete it: "
            "give another folder as --out, remove that one by hand, or write `--force` to delete all of it"
        )


def _not_ours(out: Path) -> str | None:
    """What in a folder was not written by quantize, merge or export; None if all of it was."""
    if not any((out / name).is_file() and read_json(out / name) for name in REPORTS):
        return f"it has no {' or '.join(REPORTS)}"
    names = sorted(path.name for path in out.iterdir() if path.name not in (TEMPLATES, START))
    return next((name for name in names if not any(fnmatchcase(name, pattern) for pattern in WRITTEN)), None)


def check_space(out: Path, needed_bytes: int) -> None:
    """Raise CheckpointError if the disk of `out` has less than `needed_bytes` plus SPARE_BYTES free."""
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + SPARE_BYTES:
        raise CheckpointError(
            f"{out} needs {(needed_bytes + SPARE_BYTES) / 2**30:.2f} GiB and {folder} has {free / 2**30:.2f} GiB free: "
            "free some space, or give a folder on another disk as --out"
        )


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder to write into. It becomes `out` when the block ends, and is deleted if the block raises.

    Raises CheckpointError if another process is writing to the same place, or if writing fails.
    """
    try:
        out = out.resolve() if out.is_symlink() else out.absolute()
        staging = out.parent / f".{out.name}.partial"
        new_folders = [parent for parent in out.parents if not parent.exists()]
        lock = _claim(staging)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written ({error.strerror}): give another folder as --out") from error
    try:
        _empty(staging)
        yield staging
        _publish(staging, out)
    except OSError as error:
        hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk"
        raise CheckpointError(
            f"{out} could not be written ({error.strerror or error}): {hint} and try again"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)
        with suppress(OSError):  # raised if `out` is in it, which then has to stay
            for folder in new_folders:
                folder.rmdir()


def set_aside(staging: Path, out: Path) -> Path:
    """Move what was written beside `out`, where it stays when its block raises. Returns the new folder."""
    out = out.resolve() if out.is_symlink() else out.absolute()
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (f"{out.name}-unverified{number}" for number in numbers)
    kept = next(path for path in map(out.with_name, names) if not path.exists())
    staging.rename(kept)
    return kept


def _claim(staging: Path) -> int:
    """Make the staging folder and lock it. Returns the file descriptor that holds the lock."""
    staging.parent.mkdir(parents=True, exist_ok=True)
    while True:
        staging.mkdir(exist_ok=True)
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise CheckpointError(
                f"another process is writing {staging}: wait for it, or give another --out"
            ) from error
        if staging.exists() and os.path.samestat(os.fstat(lock), staging.stat()):
            return lock
        os.close(lock)  # another writer finished and moved it away between our mkdir and flock


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _publish(staging: Path, out: Path) -> None:
    """Flush every file to disk, then move the folder to its place, swapping it with an old one in one step."""
    for path in sorted(staging.rglob("*"), reverse=True):
        fsync(path)
    fsync(staging)
    if out.is_dir() and any(out.iterdir()):
        _exchange(staging, out)
    else:
        staging.rename(out)  # replaces an empty folder too
    fsync(out.parent)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders atomically on Linux. Elsewhere the old one is removed first, and a kill in between loses it.

    Python has no call for this: os.rename and os.replace refuse a folder that is not empty, and moving the old one
    away first would leave a moment without a model for those who load it.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 and not renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE):
        return
    shutil.rmtree(old)
    new.rename(old)
