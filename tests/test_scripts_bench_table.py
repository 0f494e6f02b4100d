"""The tables of benchmarks/: what a reader is told against the files; the page in the repository is current."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_table  # noqa: E402 - scripts/ is no package


def test_a_ratio_is_against_the_first_row_and_a_size_that_was_not_run_is_empty(tmp_path):
    write(tmp_path, "rollout-7b-qerl", decode_tokens_per_s={"1": 300.0})
    write(tmp_path, "rollout-7b-bf16", decode_tokens_per_s={"1": 150.0, "8": 1000.0})
    rows = bench_table.rollout_table(bench_table.read(tmp_path, "rollout")["7b"])
    assert rows[2] == "| stock vLLM 0.25.1, BF16 + LoRA | 150 (1.00) | 1000 (1.00) |"
    assert rows[3] == "| qerl, NVFP4 + LoRA | 300 (2.00) |  |"


@pytest.mark.parametrize(("seconds", "expected"), [([9.0, 2.0, 4.0], "3.0"), ([9.0], "9.0")])
def test_the_first_step_counts_only_where_it_is_the_only_one(tmp_path, seconds, expected):
    write(tmp_path, "step-7b-trl", steps=[{"step_time": s} for s in seconds], peak_driver_gib=58.58)
    rows = bench_table.step_table(bench_table.read(tmp_path, "step")["7b"])
    assert rows[2].split(" | ")[1:] == [expected, "", "", "", "", "58.6", " |"]


def test_the_page_in_the_repository_is_drawn_from_its_files():
    folder = ROOT / "benchmarks"
    page = bench_table.page(bench_table.read(folder, "rollout"), bench_table.read(folder, "step"))
    assert (folder / "README.md").read_text(encoding="utf-8") == page, "run python3 scripts/bench_table.py"


def write(folder, name, **content):
    (folder / f"{name}.json").write_text(json.dumps({"command": "x", "gpu": "H200", **content}), encoding="utf-8")
