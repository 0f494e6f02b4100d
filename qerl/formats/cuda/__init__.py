"""Our CUDA sources, and what compiles, launches and times them and describes matrices to the copy engine."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "sources"


def source_texts(source: str) -> tuple[str, list[str]]:
    """The text of a source in FOLDER, and of all headers."""
    headers = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.cuh"))]
    return (FOLDER / source).read_text(encoding="utf-8"), headers


def cache_folder() -> Path:
    """Where compiled kernels and measured times are kept: $QERL_CACHE, or `qerl` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl"
    return Path(os.environ.get("QERL_CACHE") or default)
