"""Write a checkpoint into its output folder: safetensors files of bounded size, the index, and the small files.

The folder is checked before long work, written next to its final place, and moved there as a whole. While it is being
written it is the hidden sibling folder `.<name>.partial`. Its writer holds a flock on it, which the kernel releases if
the process is killed. The next run with the same output clears what a killed one left behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.base.errors import CheckpointError
from qerl.base.files import fsync, mode_by_umask
from qerl.checkpoint.base_start import START
from qerl.checkpoint.hub import TEMPLATES
from qerl.checkpoint.shards import INDEX, SINGLE, read_json

if TYPE_CHECKING:
    import torch


SHARD_BYTES = 5_000_000_000  # the same as the hub's own tools
OF_TOKENIZERS = (
    "tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "*.tiktoken",
)  # fmt: skip
SMALL_FILES = ("generation_config.json", *OF_TOKENIZERS, "LICENSE*", "NOTICE*")
TOKENIZER_CONFIG = "tokenizer_config.json"


def write_weights(folder: Path, groups: Iterable[dict[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write all tensors of `groups` in their order. Returns their bytes.

    A file is closed when the next group would make it larger than `shard_bytes`; its tensors stay in memory until then.
    """
    placed: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = 0
    for group in groups:
        size = _nbytes(group)
        if pending and _nbytes(pending) + size > shard_bytes:
            placed.append(_write_part(folder, len(placed), pending))
            pending = {}
        pending |= group
        total += size
    placed.append(_write_part(folder, len(placed), pending))
    _name_parts(folder, placed, total)
    return total


def _write_part(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = _part(folder, number)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps an OSError, of which it keeps only the text
        full = "No space left" in str(error) or "quota" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    mode_by_umask(path)
    return list(tensors)


def _name_parts(folder: Path, placed: list[list[str]], total: int) -> None:
    if len(placed) == 1:
        _part(folder, 0).rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(placed):
        file = f"model-{number + 1:05d}-of-{len(placed):05d}.safetensors"
        _part(folder, number).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def copy_small_files(source: Path, folder: Path, code: bool = False) -> list[str]:
    """Copy tokenizer, chat templates, generation config, licence and, with `code`, *.py files. Returns their names."""
    return _copy(source, folder, (*SMALL_FILES, "*.py") if code else SMALL_FILES)


def copy_tokenizer(source: Path, folder: Path) -> bool:
    """Copy a model's tokenizer files as they are beside an adapter, with code that they name.

    Returns False, and copies nothing, if they do not name the tokenizer's class: transformers would ask for that in a
    config.json, which an adapter has not.
    """
    path = source / TOKENIZER_CONFIG
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config.get("tokenizer_class"), str):
        return False
    _copy(source, folder, (*OF_TOKENIZERS, "*.py") if "auto_map" in config else OF_TOKENIZERS)
    return True


def _copy(source: Path, folder: Path, patterns: Iterable[str]) -> list[str]:
    names = sorted({path.name for pattern in patterns for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES, copy_function=shutil.copyfile)
        names.append(TEMPLATES)
    return names


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


MERGE_REPORT, EXPORT_REPORT = "merge_report.json", "export_report.json"
FILES = "qerl_files.json"  # in each folder that qerl wrote: its files, so that --overwrite replaces nothing else
SPARE_BYTES = 64 * 2**20  # for tokenizer, config, report, and the file system's own needs
WHOLE_BYTES = 16 * 2**20  # of a longer file the beginning and the end tell it from another of its size
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
    if not force:
        check_ours(out)


def check_ours(out: Path) -> None:
    """Raise CheckpointError if the folder holds anything that is not in a list of files that qerl wrote there."""
    if foreign := _not_ours(out):
        raise CheckpointError(
            f"{out} holds something else than what qerl wrote there ({foreign}), and --overwrite would delete it: "
            "give another folder as --out, remove that one by hand, or write `--force` to delete all of it"
        )


def list_files(folder: Path, only: Iterable[str] | None = None) -> None:
    """Write down the folder's files, or add those that were written since."""
    known = _listed(folder) if only is not None else {}
    names = only if only is not None else (str(path.relative_to(folder)) for path in _files(folder))
    write_json(folder / FILES, dict(sorted({**known, **{name: _digest(folder / name) for name in names}}.items())))


def _not_ours(out: Path) -> str | None:
    """What in a folder qerl did not write, or is not as it wrote it; None if there is no such thing."""
    lists = (*([out.parent] if out.name == START else []), out, out / START)  # a start has its own, or the folder's
    if not any((folder / FILES).is_file() for folder in lists[:-1]):
        return f"it has no {FILES}"
    known = {folder / name: digest for folder in lists for name, digest in _listed(folder).items()}
    for path in _files(out):
        if path.name == FILES and path.parent in lists:
            continue
        if path not in known:
            return str(path.relative_to(out))
        if path.is_symlink() or _digest(path) != known[path]:
            return f"{path.relative_to(out)} has changed"
    empty = (path for path in sorted(out.rglob("*")) if path.is_dir() and not any(path.iterdir()))
    return next((str(path.relative_to(out)) for path in empty), None)


def _files(folder: Path) -> list[Path]:
    """All that is no folder, links to folders included."""
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _listed(folder: Path) -> dict[str, str]:
    """The list of a folder; empty where it cannot be read."""
    try:
        found = read_json(folder / FILES) if (folder / FILES).is_file() else {}
    except CheckpointError:
        return {}
    return {name: digest for name, digest in found.items() if isinstance(digest, str)}


def _digest(path: Path) -> str:
    """The size of a file and a hash of its content, or of both ends of a long one."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            digest.update(file.read(WHOLE_BYTES // 2))
            file.seek(size - WHOLE_BYTES // 2)
            digest.update(file.read())
    return f"{size}-{digest.hexdigest()[:16]}"


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

    SIGTERM and SIGHUP, where they would end the process, raise SystemExit, so the folder is deleted then too.
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
        with _ends_by_raising():
            yield staging
        list_files(staging)
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


@contextmanager
def _ends_by_raising() -> Iterator[None]:
    """Raise SystemExit for signals that would end the process at once."""
    main = threading.current_thread() is threading.main_thread()  # no other thread can set a handler
    taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(each) == signal.SIG_DFL]
    for each in taken:
        signal.signal(each, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def set_aside(staging: Path, out: Path) -> Path:
    """Move what was written beside `out`, where it stays when its block raises. Returns the new folder."""
    out = out.resolve() if out.is_symlink() else out.absolute()
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (f"{out.name}-unverified{number}" for number in numbers)
    kept = next(path for path in map(out.with_name, names) if not path.exists())
    list_files(staging)
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
