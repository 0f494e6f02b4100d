"""Writing files that survive a kill and a power cut."""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by `text`. A reader finds the old content or the new, whole, at any time."""
    temporary = path.with_suffix(".partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def mode_by_umask(path: Path) -> None:
    """Give a file the mode that `open` would have given it; safetensors makes files that only this user can read.

    The umask is read from a file, because asking the system for it means setting it, for all threads.
    """
    probe = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        path.chmod(stat.S_IMODE(probe.stat().st_mode))
    finally:
        probe.unlink()


def refusal_of(error: Exception) -> str | None:
    """The system's message if `error` says that the disk takes no more data. Of safetensors only the text says so."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return os.strerror(error.errno)
    said = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(said[1])) if said and int(said[1]) in NO_ROOM else None


def write_shared(path: Path, data: bytes) -> None:
    """Write a file in a folder that processes and users share. A reader finds the content of one writer, whole.

    The umask decides the file's mode; `tempfile` would make it readable by this user only.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_bytes(data)
    temporary.replace(path)
