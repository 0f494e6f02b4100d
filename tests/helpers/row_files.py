"""Data files of each format that qerl reads."""

import gzip
import json
from pathlib import Path

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "test.jsonl"
ROWS = [{"question": f"What is {n}+1?", "answer": str(n + 1)} for n in range(5)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_sums(path, count=120):
    """Rows that calibration can read."""
    rows = [{"question": f"What is {n} plus {n % 7}?", "answer": f"The answer is {n + n % 7}."} for n in range(count)]
    return write_jsonl(path, rows)


def write_parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_csv(path, rows, delimiter=","):
    lines = [delimiter.join(rows[0]), *(delimiter.join(f'"{cell}"' for cell in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def write(path, rows):
    name = path.name
    if name.endswith(".parquet"):
        return write_parquet(path, rows)
    if name.endswith((".csv", ".tsv")):
        return write_csv(path, rows, "\t" if name.endswith(".tsv") else ",")
    text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)
