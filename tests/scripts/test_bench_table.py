"""The tables of benchmarks/ agree with the files, and the page in the repository is current."""

import json
from pathlib import Path

import bench_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_in_the_repository_is_drawn_from_its_files():
    folder = ROOT / "benchmarks"
    assert (folder / "README.md").read_text(encoding="utf-8") == bench_table.page(folder), (
        "run python3 scripts/bench/bench_table.py"
    )


def test_every_file_of_the_benchmarks_is_on_the_page():
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    files = [path for path in (ROOT / "benchmarks").glob("*.json") if not path.name.startswith("study-")]
    asked = {path.name: json.loads(path.read_text(encoding="utf-8"))["command"].partition(" ")[2] for path in files}
    assert [name for name, options in asked.items() if options not in page] == []
