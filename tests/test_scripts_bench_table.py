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
    page = bench_table.page(*(bench_table.read(folder, kind) for kind in ("rollout", "step", "linear")))
    assert (folder / "README.md").read_text(encoding="utf-8") == page, "run python3 scripts/bench_table.py"


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


def test_a_layers_linears_by_tokens_and_what_was_not_measured_is_empty(tmp_path):
    write(tmp_path, "linear-7b-rank32", **linear_report())
    layers = bench_table.read(tmp_path, "linear")
    rows = bench_table.layer_table(layers["7b"]["rank32"])
    assert rows[0].startswith("| tokens, rank 32 | default ways us |")
    assert rows[2:] == [
        "| 8 | 36.0 | 52% | 20% | 90.0 | 25% | 2.50 | 33.0 |",
        "| 64 |  |  |  | 90.0 | 25% |  | 60.0 |",
    ]
    rows = bench_table.linear_table(layers["7b"]["rank32"])
    assert rows[2:] == ["| qkv, fused | 12.0 (35%) |  |", "| qkv, bf16 |  | 30.0 (100%) |"]
    page = bench_table.page({}, {}, layers)
    assert "## The linears of a decoder layer, 7B shape" in page
    assert "linears" not in bench_table.page({}, {}, {})


def test_the_command_draws_what_lies_in_a_folder(tmp_path, monkeypatch):
    write(tmp_path, "linear-7b-rank32", **linear_report())
    monkeypatch.setattr(
        sys, "argv", ["bench_table.py", "--folder", str(tmp_path), "--images", str(tmp_path / "images")]
    )
    bench_table.main()
    assert "| qkv, fused | 12.0 (35%) |  |" in (tmp_path / "README.md").read_text(encoding="utf-8")


def write(folder, name, **content):
    (folder / f"{name}.json").write_text(json.dumps({"command": "x", "gpu": "H200", **content}), encoding="utf-8")
