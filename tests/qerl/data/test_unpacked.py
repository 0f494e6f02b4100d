"""Data files that grow without end when they are read end in one line that says how to allow more."""

import gzip
import json
import os
import time

import pyarrow
import pytest
from pyarrow import parquet

from qerl.base.errors import DataError
from qerl.data.examples import load_examples
from qerl.data.rows import VARIABLE, local_rows
from qerl.data.tasks import get_task

ROW = json.dumps({"question": "3+4?", "answer": "7"}) + "\n"
LARGE = 1 << 25


def gzip_of(path, pieces):
    with gzip.open(path, "wb", compresslevel=1) as file:
        for piece in pieces:
            file.write(piece)


def zeros(path):
    gzip_of(path, [b"0" * 2**20] * 64)


def empty_lines(path):
    gzip_of(path, [b"\n" * 2**20] * 16)


def small_rows(path):
    gzip_of(path, [ROW.encode(), *[b"{}\n" * 2**18] * 16])


def same_rows(path):
    gzip_of(path, [ROW.encode() * 2**15] * 16)


def one_text_for_all(path):
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 50_000, pyarrow.int32()), ["x" * 2**20])
    parquet.write_table(pyarrow.table({"question": column, "answer": column}), path)


def long_list(path):
    values = pyarrow.array([0] * 1_000_000, pyarrow.int64())
    lists = pyarrow.ListArray.from_arrays([0, len(values)], values)
    parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["b"], "extra": lists}), path)


def packed_zeros(path):
    table = pyarrow.table({"question": ["0" * LARGE], "answer": ["1"]})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)


def columns(path):
    path.write_text(",".join(f"c{number}" for number in range(5000)) + "\n" + "1\n" * 100_000)


def wide_parquet(path):
    parquet.write_table(pyarrow.table({f"c{number}": ["1"] for number in range(5000)}), path)


def empty_rows(path):
    nothing = pyarrow.nulls(100_000, pyarrow.string())
    parquet.write_table(pyarrow.table({"question": nothing, "answer": nothing}), path)


def sparse(path):
    with path.open("wb") as file:
        file.write(ROW.encode())
        file.truncate(1 << 40)


BOMBS = {
    "zeros.jsonl.gz": zeros, "zeros.json.gz": zeros, "zeros.csv.gz": zeros,
    "empty.jsonl.gz": empty_lines, "empty.csv.gz": empty_lines, "small.jsonl.gz": small_rows,
    "rows.jsonl.gz": same_rows, "text.parquet": one_text_for_all,
    "list.parquet": long_list, "zeros.parquet": packed_zeros, "columns.csv": columns, "sparse.jsonl": sparse,
    "columns.parquet": wide_parquet, "rows.parquet": empty_rows,
    "sparse.json": sparse, "sparse.csv": sparse,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_grows_without_end_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr("qerl.data.rows.MOST_GIB", 2**-8)
    BOMBS[name](tmp_path / name)
    began = time.process_time()
    with pytest.raises(DataError, match=name) as refused:
        load_examples(get_task("arith"), str(tmp_path / name), columns={"question": "question", "answer": "answer"})
    assert time.process_time() - began < 30
    assert any(word in str(refused.value) for word in (VARIABLE, "a row of more than", "more than 1000 columns"))


def test_the_limit_can_be_raised(tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.data.rows.MOST_GIB", 2**-14)
    file = tmp_path / "rows.jsonl.gz"
    gzip_of(file, [ROW.encode() * 1000])
    with pytest.raises(DataError, match=f"{VARIABLE}=1$"):
        list(local_rows(str(file), "train"))
    monkeypatch.setenv(VARIABLE, "0.5")
    assert len(list(local_rows(str(file), "train"))) == 1000
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(DataError, match="write a number of GiB"):
        list(local_rows(str(file), "train"))


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path):
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match="no regular file"):
            list(local_rows(str(tmp_path / name), "train"))


def test_the_same_text_in_many_rows_of_parquet_is_read(tmp_path):
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5000, pyarrow.int32()), ["x" * 1000])
    nested = [[{"content": str(number)}] for number in range(5000)]
    parquet.write_table(pyarrow.table({"question": column, "prompt": nested}), tmp_path / "rows.parquet")
    rows = list(local_rows(str(tmp_path / "rows.parquet"), "train"))
    assert len(rows) == 5000
    assert rows[4999][1] == {"question": "x" * 1000, "prompt": [{"content": "4999"}]}


def test_rows_that_nest_deeply_are_left_out(tmp_path):
    deep = "[" * 100_000
    (tmp_path / "rows.jsonl").write_text(ROW + f'{{"question": "1+1?", "answer": "2", "extra": {deep}}}\n' + ROW)
    assert [row is None for _, row in local_rows(str(tmp_path / "rows.jsonl"), "train")] == [False, True, False]


def test_a_row_with_many_columns_is_a_short_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({f"column {number}": "1" for number in range(20_000)}))
    with pytest.raises(DataError, match=r"column 19 and 19980 more\)") as refused:
        load_examples(get_task("arith"), str(tmp_path / "rows.jsonl"))
    assert len(str(refused.value)) < 800


def test_it_is_said_how_far_reading_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("qerl.data.rows.SAY_S", -1.0)
    (tmp_path / "rows.jsonl").write_text(ROW * 20_001)
    with caplog.at_level("INFO"):
        assert len(list(local_rows(str(tmp_path / "rows.jsonl"), "train"))) == 20_001
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "10000 rows so far",
        "20000 rows so far",
    ]
