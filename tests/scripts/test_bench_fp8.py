"""bench_fp8.py: the rows that a CPU can make, and what it says of a way that fails."""

import argparse
import json

import pytest
import torch

from scripts.bench import bench_fp8


def test_the_products_of_training_run_by_each_recipe():
    calls = []
    found = [*bench_fp8.trained("o", (48, 64), 32, lambda call: calls.append(call()) or 2e-9)]
    assert {(row["way"], row["product"]) for row in found} >= {
        ("bf16", "dx"),
        ("tensorwise e5m2", "dW"),
        ("tensorwise e4m3", "dx"),
        ("blockwise e4m3", "y"),
        ("blockwise e4m3", "dx"),
    }
    failed = {(row["way"], row["product"]) for row in found if "failed" in row}
    assert failed <= {("bf16", "dW")}  # whose float32 sum of bfloat16 is a card's
    assert {row["tflops"] for row in found if "tflops" in row} == {round(2 * 32 * 48 * 64 / 2e-9 / 1e12, 1)}
    shapes = {tuple(made.shape) for made in calls}
    assert shapes == {(32, 48), (32, 64), (48, 64)}


def test_a_way_has_its_error_or_why_it_failed():
    right = torch.ones(2, 3)
    assert bench_fp8.tried([lambda: right * 1.5], right, lambda calls: 3.0) == {"us": 3.0, "error": 0.5}

    def fails():
        raise RuntimeError("no compiler\nlong trace")

    assert bench_fp8.tried([fails], right, lambda calls: 3.0) == {"failed": "no compiler"}


def test_the_file_has_each_row_at_once(tmp_path, monkeypatch):
    def rows(arguments):
        yield {"kernel": "one"}
        raise KeyboardInterrupt

    out = tmp_path / "f.json"
    monkeypatch.setattr(bench_fp8, "require_card", lambda *names: None)
    monkeypatch.setattr(bench_fp8, "rows", rows)
    monkeypatch.setattr("scripts.bench.limits.copy_gb_per_s", lambda: 4000.0)
    monkeypatch.setattr("scripts.bench.limits.matrix_tflops", lambda: 700.0)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self: argparse.Namespace(out=out))
    with pytest.raises(KeyboardInterrupt):
        bench_fp8.main()
    assert json.loads(out.read_text())["rows"] == [{"kernel": "one"}]
