"""Folders that carry a checksum of each of their files, so that a lost bit is noticed before the files are used.

Checkpoints of runs are such folders, and so is the adapter of a finished run. Importing this loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path

from qerl.base.bounded import JSON_BYTES, parse_json, read_text
from qerl.base.disk import fsync
from qerl.checkpoint.adapter_file import ADAPTER_FILES

CHECKSUMS = "checksums.json"


def seal(folder: Path) -> None:
    """Flush every file to disk, then write the checksums."""
    sums = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        sums[file.relative_to(folder).as_posix()] = _sha256(file)
        fsync(file)
    target = folder / CHECKSUMS
    target.write_text(json.dumps(sums, indent=1), encoding="utf-8")
    fsync(target)
    fsync(folder)


def read_sums(folder: Path) -> dict[str, str] | None:
    """The checksums by file name; None if they cannot be read. What is no object comes back empty."""
    try:
        sums = parse_json(read_text(folder / CHECKSUMS, JSON_BYTES))
    except (OSError, ValueError):
        return None
    return sums if isinstance(sums, dict) else {}


def damage_of(folder: Path, expected: Collection[str], only: Collection[str] | None = None) -> str | None:
    """What is wrong with a folder that has to hold the `expected` files; None if it is good. `only` these files are
    compared, if it is given."""
    sums = read_sums(folder)
    if sums is None:
        return f"it has no readable {CHECKSUMS}"
    if unlisted := sorted(set(expected) - set(sums)):
        return f"{CHECKSUMS} does not list {', '.join(unlisted)}"
    for name, sum_ in sums.items():
        if only is not None and name not in only:
            continue
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if _sha256(file) != sum_:
            return f"{name} does not match its checksum"
    return None


def adapter_damage(folder: Path) -> str | None:
    """What is wrong with the files of an adapter. One that another program saved has no checksums, and counts as good;
    a checkpoint, which holds the trainer's state too, does not."""
    if (folder / CHECKSUMS).exists():
        return damage_of(folder, ADAPTER_FILES, only=ADAPTER_FILES)
    return f"it has no {CHECKSUMS}" if (folder / "trainer_state.json").exists() else None


def adapters_of_run(run: Path) -> list[Path]:
    """The folders with an adapter that a run has saved: its result first, then checkpoints from the newest back, then
    the adapter of its best validation."""
    saved = [file.parent for file in run.glob("checkpoints/[!.]*/adapter_config.json")]
    saved.sort(key=lambda folder: ([int(number) for number in re.findall(r"\d+", folder.name)], folder), reverse=True)
    return [path for path in (run / "adapter", *saved, run / "best") if (path / "adapter_config.json").is_file()]


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
