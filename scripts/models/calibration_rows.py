#!/usr/bin/env python3
"""Make quantize/rows/mixed.jsonl.gz, the calibration rows that ship with qerl, from the three sources of its README.md.

    python3 scripts/models/calibration_rows.py gsm8k/train.jsonl.gz dapo_math_17k/train.jsonl.gz docs

The first two are files with one JSON object per line. Both need the fields `question`, `eval_exact` and `eval_near`
(the evaluation sets that hold the same or nearly the same question), GSM8K also `solution`, DAPO-Math-17k also `lang`,
`dup` and `conflict`. The third is a folder of Markdown pages. Given the same sources, the file is the same to the byte
wherever zlib is the same.

1. A row that any evaluation set holds, exactly or nearly, is never taken.
2. GSM8K's calculator marks (`<<48/2=24>>`) are removed, because no model writes them.
3. Tables of the pages are left out: they are mostly numbers.
4. The kinds take turns in the order of ROUND, so that the first rows of the file are mixed however few are used.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "quantize" / "rows" / "mixed.jsonl.gz"
ROUND = ("gsm8k", "dapo_math", "docs", "gsm8k", "dapo_math", "gsm8k", "dapo_math")
ROUNDS = 64
SEED = 0
PIECE = 900  # characters of a piece of a page, at least
MARKS = re.compile(r"<<[^<>]*>>")


def eligible(row: dict) -> bool:
    """Whether a row may be taken: English, not repeated, without contradicting answers, and near no evaluation set."""
    marked = [*row["eval_exact"], *row["eval_near"]]
    return not (marked or row.get("dup") or row.get("conflict")) and row.get("lang", "en") == "en"


def gsm8k_row(row: dict) -> dict:
    """A question with its worked solution as a chat."""
    answer = MARKS.sub("", row["solution"])
    turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
    return {"kind": "gsm8k", "messages": turns}


def dapo_row(row: dict) -> dict:
    """A question alone as a chat: the source has no worked solutions."""
    return {"kind": "dapo_math", "messages": [{"role": "user", "content": row["question"]}]}


def pieces(page: str) -> Iterator[str]:
    """The page's paragraphs, without tables, joined until a piece has PIECE characters; a shorter rest is dropped."""
    piece: list[str] = []
    for paragraph in re.split(r"\n\s*\n", page):
        if not paragraph.strip() or paragraph.lstrip().startswith("|"):
            continue
        piece.append(paragraph.strip("\n"))
        if sum(map(len, piece)) >= PIECE:
            yield "\n\n".join(piece)
            piece = []


def spread(found: list[str], count: int) -> list[str]:
    """`count` of them at equal distances, so that they come from all pages."""
    if len(found) < count:
        raise SystemExit(f"the pages give {len(found)} pieces of {PIECE} characters, and {count} are needed")
    return [found[number * len(found) // count] for number in range(count)]


def drawn(rows: Iterable[dict], count: int, name: str) -> list[dict]:
    """`count` eligible rows, drawn with a fixed seed."""
    found = [row for row in rows if eligible(row)]
    if len(found) < count:
        raise SystemExit(f"{name} has {len(found)} rows that may be taken, and {count} are needed")
    return random.Random(SEED).sample(found, count)


def mixed(gsm8k: Iterable[dict], dapo: Iterable[dict], pages: Iterable[str]) -> list[dict]:
    """The rows in the order of the file."""
    docs = [piece for page in pages for piece in pieces(page)]
    count = {kind: ROUND.count(kind) * ROUNDS for kind in ROUND}
    kinds = {
        "gsm8k": iter([gsm8k_row(row) for row in drawn(gsm8k, count["gsm8k"], "GSM8K")]),
        "dapo_math": iter([dapo_row(row) for row in drawn(dapo, count["dapo_math"], "DAPO-Math-17k")]),
        "docs": iter([{"kind": "docs", "text": text} for text in spread(docs, count["docs"])]),
    }
    return [next(kinds[kind]) for kind in ROUND * ROUNDS]


def packed(rows: Iterable[dict]) -> bytes:
    """The rows as JSON lines, gzipped without a time stamp and a name."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    target = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=target, mtime=0) as file:
        file.write(text.encode())
    return target.getvalue()


def read(path: Path) -> list[dict]:
    """The rows of a file of JSON lines, gzipped or not."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.split(b"\n") if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gsm8k", type=Path, help="GSM8K's training rows")
    parser.add_argument("dapo", type=Path, help="DAPO-Math-17k's rows")
    parser.add_argument("docs", type=Path, help="the folder of qerl's pages")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    pages = [path.read_text(encoding="utf-8") for path in sorted(given.docs.rglob("*.md"))]
    rows = mixed(read(given.gsm8k), read(given.dapo), pages)
    data = packed(rows)
    given.out.write_bytes(data)
    print(f"wrote {len(rows)} rows, {len(data):,} bytes, to {given.out}")


if __name__ == "__main__":
    main()
