"""Files: reading within limits, writing that survives a kill, and what an error says of a path that does not exist.

A file of others may be cut short, damaged, or made to do harm: a pipe that never ends, a sparse file of a terabyte,
brackets that nest deeper than Python's stack, a number that takes minutes to read. Each of these is a ValueError here,
which the readers of the single kinds of files turn into their own error.

os.path is asked because it says no where pathlib raises: for a name that is too long, or a folder that may not be read.
"""

import difflib
import errno
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

JSON_BYTES = 64 * 2**20  # the largest index of a published checkpoint has 9 MB, the largest tokenizer.json 35 MB
LINE_BYTES = 64 * 2**20  # of metrics and completions that a run or an evaluation wrote
DEPTH = 64  # lists and objects within one another; what is read here nests less than ten deep
DIGITS = 64  # of a whole number; transformers writes one of 31 where a tokenizer has no longest input


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file. Raises ValueError if it has more than `limit` bytes or is not a regular file."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit or len(data := file.read(size + 1)) > limit:  # reading takes memory for all that is asked for
            raise ValueError(f"it has more than {limit} bytes, and no such file is that large")
        return data


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends. Raises ValueError for one of more than LINE_BYTES, and for what is no
    regular file."""
    with _open(path) as file:
        while line := file.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise ValueError(f"it has a line of more than {LINE_BYTES} bytes")
            yield line


def read_text(path: Path, limit: int) -> str:
    """The text of a file in UTF-8. Raises ValueError for what `read_bytes` refuses, and for other encodings."""
    return read_bytes(path, limit).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for no JSON, deep nesting, and whole numbers of absurd length."""
    try:
        value = json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, brackets)) > DEPTH and _is_deep(value):
        raise ValueError(f"it is nested more than {DEPTH} deep")
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, list | dict)]
        if not level:
            return False
    return True


def _open(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without this, opening a pipe waits for its writer
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise ValueError("it is no regular file")
    return file


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


@contextmanager
def in_one_step(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, to be filled and then renamed to it. What the block leaves of it is deleted."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed here
    try:
        partial.mkdir(parents=True)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


NAMED = 3  # neighbours that an error names


def expanded(ref: str) -> Path:
    """`ref` with the home folder for its `~`; unchanged if no user here has that name."""
    return Path(os.path.expanduser(ref))


def is_path(ref: str) -> bool:
    """Whether a `ref` that does not exist was meant as a path: by its form, or as its parent is a folder here."""
    return ref[:1] in ("/", ".", "~") or ref.count("/") > 1 or ("/" in ref and os.path.isdir(Path(ref).parent))


def no_folder(ref: str) -> str:
    """`there is no folder runs/dnoe (did you mean runs/done?)`."""
    path = expanded(ref)
    above = next((parent for parent in reversed(path.parents) if not os.path.exists(parent)), None)
    around = f"{above}/ is not there either" if above else close_to(ref) or _beside(path)
    return f"there is no folder {ref}{f' ({around})' if around else ''}"


def close_to(ref: str, files: bool = False) -> str:
    """`did you mean runs/done?`: folders (and files) of a similar name beside it; "" if there are none."""
    path = expanded(ref)
    names = {name.lower(): name for name in _names(path.parent, files)}
    found = [names[each] for each in difflib.get_close_matches(path.name.lower(), names, n=2)]
    return f"did you mean {' or '.join(str(path.parent / name) for name in found)}?" if found else ""


def _beside(path: Path) -> str:
    names = _names(path.parent)
    if not names:
        return ""
    others = f" and {len(names) - NAMED} others" if len(names) > NAMED + 1 else ""
    shown = names[:NAMED] if others else names
    return f"beside it: {', '.join(str(path.parent / name) for name in shown)}{others}"


def _names(parent: Path, files: bool = False) -> list[str]:
    try:
        return sorted(path.name for path in parent.iterdir() if (files or path.is_dir()) and path.name[:1] != ".")
    except OSError:
        return []
