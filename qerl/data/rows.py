"""The rows of files and data sets as they are stored, each with its place for messages, and the sources of a recipe.

Files are read here rather than by `datasets`, which would guess types by column (an answer "033" in a CSV becomes 33,
"NA" becomes nothing), fail on a column of mixed types, and know no line numbers.

A few megabytes of gzip or parquet can stand for terabytes. So a row may have ROW_BYTES, and all of a file MOST_GIB;
QERL_MAX_DATA_GIB sets another limit for a data set that really is that large. Loads no torch.
"""

from __future__ import annotations

import csv
import gzip
import json
import logging
import os
import re
import time
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from qerl.base.errors import ConfigError, DataError, first_line
from qerl.base.files import close_to, expanded, is_path, no_folder
from qerl.base.hub import HUB_ID, reachable, refusal
from qerl.base.program import given_rows

if TYPE_CHECKING:
    from qerl.config.data import DataConfig, RewardConfig, SourceConfig, SourceValidationConfig


logger = logging.getLogger(__name__)

NOT_AVAILABLE = ("nan", "<na>", "nat")  # what pandas writes for an empty cell whose column it turns into text
UNSEEN = ("Cf", "Cc", "Zs", "Zl", "Zp")  # categories of characters that show nothing, such as a zero width space
_PANDAS = ("NAType", "NaTType")


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing: None, NaN, pandas' NA, no visible text, their names, an empty list or object.

    "NA", "None" and "null" are words that may be meant, so they are not empty.
    """
    if value is None or type(value).__name__ in _PANDAS:
        return True
    if isinstance(value, str):
        text = value.strip()
        return text.casefold() in NOT_AVAILABLE or all(unicodedata.category(each) in UNSEEN for each in text)
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, Mapping | list | tuple):
        return not value
    return isinstance(value, float) and value != value


def without_nulls(value: Any) -> Any:
    """The value without the keys of objects that are null: parquet gives each object the keys of all others."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


VARIABLE = "QERL_MAX_DATA_GIB"
MOST_GIB = 4.0
ROW_BYTES = 16 * 2**20
COLUMNS = 1000
LEAST_ROW = 256  # what a row counts at least, since an empty one takes time too
SHOWN = 20  # names of columns in a message
SAY_S = 15.0  # after which it is said how far the reading of a file is


class Budget:
    """How much may still be read from one file."""

    def __init__(self, file: Path) -> None:
        self._file, self.left = file, int(_most_gib() * 2**30)

    def take(self, size: int) -> None:
        """Count a row of `size` bytes. Raises DataError if it or all rows together are too large."""
        if size > ROW_BYTES:
            raise DataError(
                f"{self._file} has a row of more than {ROW_BYTES >> 20} MiB, which is no question with its answer: "
                "leave that row out, or its large columns"
            )
        self.check(max(size, LEAST_ROW))
        self.left -= max(size, LEAST_ROW)

    def check(self, size: int) -> None:
        """Raise DataError if `size` more bytes are more than may be read."""
        if size > self.left:
            raise DataError(
                f"{self._file} grows to more than {_most_gib():.3g} GiB when it is unpacked, for which it is damaged "
                f"or made: unpack and look at it, or allow more with {VARIABLE}={int(2 * _most_gib()) + 1}"
            )


def lines_of(text: TextIO, budget: Budget) -> Iterator[str]:
    """The lines of a text, each counted."""
    while line := text.readline(ROW_BYTES + 1):
        budget.take(len(line))
        yield line


def size_of(value: Any) -> int:
    """About the bytes that a value of a row takes."""
    if isinstance(value, str | bytes):
        return len(value) + 64
    if isinstance(value, dict):
        return 64 + sum(map(size_of, value.values()))
    return 64 + sum(map(size_of, value)) if isinstance(value, list | tuple) else 32


def names_of(columns: Iterable[object]) -> str:
    """The names of columns, each once and shortened, as a message shows them."""
    names = [str(name)[:60] for name in dict.fromkeys(columns)]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _most_gib() -> float:
    text = os.environ.get(VARIABLE, str(MOST_GIB))
    try:
        asked = float(text)
    except ValueError:
        asked = 0.0
    if not 0 < asked < 2**20:
        raise DataError(f"{VARIABLE} is {text!r}: write a number of GiB above 0, such as {VARIABLE}=16")
    return asked


AS_DATA = ("task", "columns", "grader")  # keys that `data` gives where a source leaves them null


@dataclass(frozen=True)
class Source:
    """One source as if it were the only one: `data` has no sources. The only source of a recipe has no name."""

    name: str
    weight: float
    data: DataConfig
    rewards: Sequence[RewardConfig]
    held_out: int = 0
    validation: SourceValidationConfig | None = None

    @property
    def validates(self) -> bool:
        """Whether validations ask rows of its own."""
        return self.validation is not None or self.held_out > 0


def sources_of(data: DataConfig, rewards: Sequence[RewardConfig] = ()) -> tuple[Source, ...]:
    """The sources of a recipe in their order; `data` without sources is its own only one. `rewards` are the recipe's,
    for those that have none of their own."""
    if not data.sources:
        return (Source("", 1.0, data, rewards, data.held_out),)
    return tuple(_settled(data, rewards, each) for each in data.sources)


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Within it, errors about rows name the source."""
    try:
        yield
    except (DataError, ConfigError) as error:
        if not source.name:
            raise
        raise type(error)(f"source {source.name}: {error}") from error


def _settled(data: DataConfig, rewards: Sequence[RewardConfig], this: SourceConfig) -> Source:
    own = {key: value for key in AS_DATA if (value := getattr(this, key)) is not None}
    if this.task not in (None, data.task) and this.grader is None:
        own["grader"] = None  # the grader of data is for the task of data
    settled = data.model_copy(update={**own, "source": this.source, "sources": ()})
    held_out = 0 if this.validation is not None else data.held_out
    return Source(this.name, this.weight, settled, this.rewards or rewards, held_out, this.validation)


FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
KINDS = f"{', '.join(FORMATS)} (text also as .gz)"
PARQUET_ROWS = 16  # made at once: each may be as large as a row may be
Row = tuple[str, Mapping[str, Any] | None]  # its place ("row 17"), and its columns, None if it cannot be read as a row


def is_local(source: str) -> bool:
    """Whether a source means a file or folder: it exists, or it cannot be a hub id; or rows that a program gave."""
    if given_rows(source) is not None:
        return True
    return os.path.exists(source) or source.endswith(".gz") or Path(source).suffix in FORMATS or source[:1] in "./~"


def local_rows(source: str, split: str) -> Iterator[Row]:
    """The rows of a file, or of the files of a folder that belong to `split`. Raises DataError."""
    if (rows := given_rows(source)) is not None:
        yield from generated_rows(rows)
        return
    path = expanded(source)
    if not os.path.exists(path):
        close = close_to(source, files=True)
        raise DataError(
            f"there is no file or folder {source!r}{f' ({close})' if close else ''}: write a path to {KINDS}, or a "
            "hub id (owner/name)"
        )
    files = _files_of_split(path, split) if path.is_dir() else [path]
    for file in files:
        prefix = "" if len(files) == 1 else f"{file.name} "
        said = time.monotonic()
        try:
            for number, row in enumerate(_read_file(file), start=1):
                if number % 10_000 == 0 and time.monotonic() - said > SAY_S:
                    said = time.monotonic()
                    logger.info("reading %s: %d rows so far", file, number)
                yield f"{prefix}row {number}", row if isinstance(row, Mapping) else None
        except (OSError, EOFError, zlib.error, UnicodeError, csv.Error) as error:
            raise DataError(f"{file} cannot be read: {error}; is it complete, and UTF-8 text or parquet?") from error


def check_hub_id(name: str) -> None:
    """Raise DataError for a name that no data set on the hub can have."""
    if not HUB_ID.fullmatch(name):
        close = close_to(name, files=True)
        raise DataError(
            f"{name!r} is neither a file nor a hub id{f' ({close})' if close else ''}: write a path to {KINDS}, or "
            "owner/name, or owner/name:subset"
        )


def hub_rows(name: str, config: str | None, split: str) -> Iterator[Row]:
    """The rows of a data set on the hub. Raises DataError, saying how to do without the hub, if they cannot be read."""
    check_hub_id(name)
    import datasets

    if not reachable():  # the cache is still read; without this the hub's client retries for half a minute
        datasets.config.HF_HUB_OFFLINE = True
    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub's client, its HTTP library and the format readers raise their own
        if (refused := refusal(error, name, data=True)) is not None:
            raise DataError(
                f"{refused}; or pass its rows with --data FILE (training: --set data.source=FILE)"
            ) from error
        meant = f"{no_folder(name)}, and " if is_path(name) else ""
        raise DataError(
            f"{meant}the data set {name!r} (subset {config or 'default'}, split {split!r}) could not be read from the "
            f"hub: {first_line(error)}; without a connection, get its files elsewhere and pass one with --data FILE "
            "(training: --set data.source=FILE)"
        ) from error
    rows = (row for batch in data.iter(1000) for row in _rows_of(batch))
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def generated_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _rows_of(batch: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


def _format(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).suffix


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The folder's data files whose name begins with the split; if none is named after a split, its only file."""
    files = sorted(
        file
        for place in (folder, folder / "data")
        if place.is_dir()
        for file in place.iterdir()
        if file.is_file() and _format(file) in FORMATS
    )
    named = [file for file in files if re.match(rf"{split}(?![A-Za-z])", file.name)]
    if named:
        return named
    if len(files) == 1 and not re.match(r"(train|test|validation)(?![A-Za-z])", files[0].name):
        return files
    inner = ", ".join(sorted(place.name for place in folder.iterdir() if place.is_dir() and place.name[0] != "."))
    folders = f"; folders: {inner}" if inner else ""
    if not files and not inner:
        raise DataError(f"{folder} holds no data file: pass the path of one: {KINDS}")
    names = ", ".join(file.name for file in files) or "none"
    raise DataError(
        f"{folder} has no file of the split {split!r} (data files: {names}{folders}): pass one of these instead"
    )


def _read_file(file: Path) -> Iterator[Any]:
    """The rows of one file, None for a broken line."""
    kind = _format(file)
    if kind not in FORMATS:
        raise DataError(f"{file} has the ending {kind!r}, which is not read: write a path to {KINDS}")
    if not file.is_file():
        raise DataError(f"{file} is no regular file, and it is read twice: write the rows to a file first")
    if kind == ".parquet":
        yield from _read_parquet(file)
        return
    packed = file.name.endswith(".gz")
    budget = Budget(file)
    with (gzip.open if packed else open)(file, "rt", encoding="utf-8-sig", newline="") as text:
        if kind == ".json":
            yield from _read_json(_whole(text, budget))
        elif kind in (".csv", ".tsv"):
            yield from _read_csv(file, lines_of(text, budget), "\t" if kind == ".tsv" else ",")
        else:
            yield from (_parse_line(line) for line in lines_of(text, budget) if line.strip())


def _read_csv(file: Path, lines: Iterator[str], delimiter: str) -> Iterator[dict[str, Any] | None]:
    csv.field_size_limit(ROW_BYTES)
    rows = csv.DictReader(lines, delimiter=delimiter)
    names = rows.fieldnames or ()
    _check_columns(file, names)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{file} has two columns {twice[0]!r}, of which one would be lost: rename one")
    yield from (None if None in row else row for row in rows)  # more cells than columns: an unquoted comma


def _check_columns(file: Path, names: Sequence[str]) -> None:
    if len(names) > COLUMNS:
        raise DataError(f"{file} has more than {COLUMNS} columns, and a row needs a question and an answer: keep these")


def _whole(text: TextIO, budget: Budget) -> str:
    """A text that is read at once, and so may be an eighth of what is read row by row (.jsonl)."""
    whole = text.read(budget.left // 8 + 1)
    budget.check(8 * len(whole))
    return whole


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    budget = Budget(file)
    try:
        with parquet.ParquetFile(file) as opened:
            paths = [opened.schema.column(number).path for number in range(len(opened.schema))]
            columns = [
                opened.metadata.row_group(group).column(number)
                for group in range(opened.metadata.num_row_groups)
                for number in range(len(paths))
            ]
            _check_columns(file, opened.schema_arrow.names)
            budget.check(sum(max(each.total_uncompressed_size, 8 * each.num_values) for each in columns))
        with parquet.ParquetFile(file, read_dictionary=paths) as opened:  # texts that rows share stay shared
            for batch in opened.iter_batches(batch_size=1000):
                for start in range(0, len(batch), PARQUET_ROWS):
                    for row in batch.slice(start, PARQUET_ROWS).to_pylist():
                        budget.take(sum(map(size_of, row.values())))
                        yield row
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise DataError(f"{file} is no parquet file that can be read ({error}): copy or download it again") from error


def _read_json(text: str) -> Iterator[Any]:
    """The rows of a JSON array, of an object with one array in it, or of JSON lines named .json."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        yield from (_parse_line(line) for line in text.split("\n") if line.strip())
        return
    lists = [item for item in value.values() if isinstance(item, list)] if isinstance(value, dict) else []
    if len(lists) == 1:
        value = lists[0]
    yield from value if isinstance(value, list) else [value]


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # ValueError: also an integer of more than 4300 digits
        return None
