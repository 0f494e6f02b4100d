"""The tables of benchmarks/ agree with the files, and the page in the repository is current."""

import json
from pathlib import Path

import bench_table
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_ratios_refer_to_the_first_row_and_sizes_that_were_not_run_are_empty(tmp_path):
    write(tmp_path, "rollout-7b-qerl", decode_tokens_per_s={"1": 300.0})
    write(tmp_path, "rollout-7b-bf16", decode_tokens_per_s={"1": 150.0, "8": 1000.0})
    rows = bench_table.rollout_table(bench_table.read(tmp_path, "rollout")["7b"])
    assert rows[2] == "| stock vLLM 0.25.1, BF16 + LoRA | 150 (1.00) | 1000 (1.00) |"
    assert rows[3] == "| qerl, NVFP4 + LoRA | 300 (2.00) |  |"


@pytest.mark.parametrize(("seconds", "expected"), [([9.0, 2.0, 4.0], "3.0"), ([9.0], "9.0")])
def test_the_first_step_counts_only_if_it_is_the_only_one(tmp_path, seconds, expected):
    write(tmp_path, "step-7b-trl", steps=[{"step_time": s} for s in seconds], peak_driver_gib=58.58)
    rows = bench_table.step_table(bench_table.read(tmp_path, "step")["7b"])
    assert rows[2].split(" | ")[1:] == [expected, "", "", "", "", "", "58.6", " |"]


def test_the_page_in_the_repository_is_drawn_from_its_files():
    folder = ROOT / "benchmarks"
    assert (folder / "README.md").read_text(encoding="utf-8") == bench_table.page(folder), (
        "run python3 scripts/bench/bench_table.py"
    )


def test_the_cost_of_an_adapter_is_given_for_sizes_that_both_files_have():
    rates = {"bf16": {"1": 200, "8": 90}, "qerl": {"1": 300}, "qerl-base": {"1": 400, "8": 100}}
    lines = bench_table.rollout_table({name: {"decode_tokens_per_s": rate} for name, rate in rates.items()})
    assert lines[-1] == "| what the adapter takes | 25.0% |  |"


def test_every_file_of_the_benchmarks_is_on_the_page():
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    files = [path for path in (ROOT / "benchmarks").glob("*.json") if not path.name.startswith("study-")]
    asked = {path.name: json.loads(path.read_text(encoding="utf-8"))["command"].partition(" ")[2] for path in files}
    assert [name for name, options in asked.items() if options not in page] == []


def write(folder, name, **content):
    (folder / f"{name}.json").write_text(json.dumps({"command": "x", "gpu": "H200", **content}), encoding="utf-8")
