"""Writing what has to survive a kill and a power cut."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def fsync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by `text`: whoever reads it, at any time, finds the old content or the new one, whole."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


def write_shared(path: Path, data: bytes) -> None:
    """Write a file of a folder that processes and users share: a reader finds one writer's content, whole.

    Its mode is what the umask says. `tempfile` would make it readable by this user only.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_bytes(data)
    temporary.replace(path)
