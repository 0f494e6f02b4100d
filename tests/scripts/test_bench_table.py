"""The tables of benchmarks/ agree with the files, and the page in the repository is current."""

import json
import sys
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


def test_phases_of_a_step_have_columns_if_a_file_has_them(tmp_path):
    parts = {"time/reward_s": 0.0124, "time/forward_s": 1.234, "time/backward_s": 2.0, "time/optimizer_s": 0.031}
    slow = dict.fromkeys(parts, 9.0)  # the first step
    write(tmp_path, "step-7b-trl", steps=[{"step_time": 3.0}])
    write(tmp_path, "step-7b-qerl", steps=[{"time/step_s": 9.0, **slow}, {"time/step_s": 3.5, **parts}])
    rows = bench_table.step_table(bench_table.read(tmp_path, "step")["7b"])
    heading = "| sync ms | grading ms | forward s | backward s | optimizer ms | GPU memory GiB | mismatch_kl |"
    assert rows[0].endswith(heading)  # no file has "other s"
    assert {row.count("|") for row in rows[:4]} == {14}
    assert rows[4:] == ["", bench_table.SPLIT_NOTE]
    assert rows[2].split(" | ")[1:] == ["3.0", *[""] * 10, " |"]
    assert rows[3].split(" | ")[1:] == ["3.5", "", "", "", "", "", "12", "1.23", "2.00", "31", "", " |"]


def test_the_page_in_the_repository_is_drawn_from_its_files():
    folder = ROOT / "benchmarks"
    assert (folder / "README.md").read_text(encoding="utf-8") == bench_table.page(folder), (
        "run python3 scripts/bench/bench_table.py"
    )


def linear_report():
    def row(tokens, way, adapter, us, share):
        return {"linear": "qkv", "tokens": tokens, "way": way, "adapter": adapter, "us": us, "share": share}

    stock = {"bf16_lora_us": 90.0, "bf16_lora_cost": 0.25}
    default = {"us": 36.04, "share": 0.515, "lora_cost": 0.2, "over_bf16_lora": 2.5}
    return {
        "rank": 32,
        "results": [
            row(8, "fused", False, 10.0, 0.4),
            row(8, "fused", True, 12.04, 0.35),
            row(64, "bf16", True, 30, 1),
        ],
        "layer": [
            {"tokens": 8, "choice": "default", **stock, **default},
            {"tokens": 8, "choice": "fastest", **stock, **default, "us": 33.0},
            {"tokens": 64, "choice": "fastest", **stock, **default, "us": 60.0},
        ],
    }


def test_the_linears_of_a_layer_by_tokens_with_empty_cells_for_what_was_not_measured(tmp_path):
    write(tmp_path, "linear-7b-rank32", **linear_report())
    layers = bench_table.read(tmp_path, "linear")
    rows = bench_table.layer_table(layers["7b"]["rank32"])
    assert rows[0].startswith("| tokens, rank 32 | default ways us |")
    assert rows[2:] == ["| 8 | 36.0 | 52% | 20% | 90.0 | 25% | 2.50 | 33.0 |", "| 64 |  |  |  | 90.0 | 25% |  | 60.0 |"]
    rows = bench_table.linear_table(layers["7b"]["rank32"])
    assert rows[2:] == ["| qkv, fused | 12.0 (35%) |  |", "| qkv, bf16 |  | 30.0 (100%) |"]
    assert "## The linears of a decoder layer, 7B shape" in bench_table.page(tmp_path)


def test_the_page_begins_with_the_notes_and_has_no_section_without_a_file(tmp_path):
    (tmp_path / "notes.md").write_text("## What was found\n\nMuch.\n")
    assert bench_table.page(tmp_path).splitlines()[4:] == ["## What was found", "", "Much."]


def test_the_command_draws_the_files_of_a_folder(tmp_path, monkeypatch):
    write(tmp_path, "linear-7b-rank32", **linear_report())
    monkeypatch.setattr(
        sys, "argv", ["bench_table.py", "--folder", str(tmp_path), "--images", str(tmp_path / "images")]
    )
    bench_table.main()
    assert "| qkv, fused | 12.0 (35%) |  |" in (tmp_path / "README.md").read_text(encoding="utf-8")


PHASE = {"wall_ms": 20.0, "busy_ms": 10.0, "categories_ms": {"product": 9.0}, "share_of_bandwidth": 0.254}
RUN = {"seed": 0, "mismatch_kl": [1e-5, 2e-5], "reward": [0.0, 0.0, 0.2, 0.4, 0.6, 0.8]}
OTHERS = {  # file -> its content, and the lines that the page has for it
    "attention-7b": (
        {
            "us": [
                {"sequences": 1, "tokens": 140, "ours": 5.48, "flash": 11.55, "limit": 0.07},
                {"sequences": 8, "tokens": "mixed", "ours": 7.0, "flash": 8.0, "limit": 1.0},
            ]
        },
        ["| 1 sequence | 5.5 / 11.6 / 0.1 |  |", "| 8 sequences |  | 7.0 / 8.0 / 1.0 |"],
    ),
    "startup-7b": (
        {"starts": [{"process_s": n, "startup_s": {"imports": n / 4, "compile": n / 2}} for n in (80.0, 40.0)]},
        ["| the process | 80.0 | 40.0 |", "| the engine | 60.0 | 30.0 |", "| of it imports | 20.0 | 10.0 |"],
    ),
    "peaks-7b": (
        {
            "peak_gib": {"train and save": 20.0, "resume": 18.0, "evaluate": 14.0},
            "steps": {
                name: [{"step": 1, "memory/train_gib": 12.0}, {"step": 2, "memory/train_gib": 11.0}]
                for name in ("train and save", "resume")
            },
        },
        [
            "| train and save | 20.0 |  |  | 12.0 |  |",
            "| resume | 18.0 |  |  | 11.0 |  |",  # without the first step, which belongs to the interrupted run
            "| evaluate | 14.0 |  |  |  |  |",
        ],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_each_other_kind_has_its_table(tmp_path, name):
    content, expected = OTHERS[name]
    write(tmp_path, name, **content)
    lines = bench_table.sections(tmp_path)
    assert [line for line in expected if line not in lines] == []
    assert lines[-4:] == ["On H200:", "", "    x", ""]


def test_the_cost_of_an_adapter_is_given_for_sizes_that_both_files_have():
    rates = {"bf16": {"1": 200, "8": 90}, "qerl": {"1": 300}, "qerl-base": {"1": 400, "8": 100}}
    lines = bench_table.rollout_table({name: {"decode_tokens_per_s": rate} for name, rate in rates.items()})
    assert lines[-1] == "| what the adapter takes | 25.0% |  |"


def test_every_file_of_the_benchmarks_is_on_the_page():
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    files = [path for path in (ROOT / "benchmarks").glob("*.json") if not path.name.startswith("study-")]
    asked = {path.name: json.loads(path.read_text(encoding="utf-8"))["command"].partition(" ")[2] for path in files}
    assert [name for name, options in asked.items() if options not in page] == []


def test_a_file_without_a_card_is_shown_without_one():
    assert bench_table.commands({"a": {"command": "x"}})[0] == "By:"
    assert bench_table.commands({"a": {"command": "x", "gpu": None}})[0] == "On CPU:"


def write(folder, name, **content):
    (folder / f"{name}.json").write_text(json.dumps({"command": "x", "gpu": "H200", **content}), encoding="utf-8")
