"""Writing what has to survive a kill and a power cut."""

from __future__ import annotations

import os
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
