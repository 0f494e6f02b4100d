"""The benchmark of quantization counts each second once, and extrapolates to the whole model."""

import json
import sys
import time

import bench_quantize
import pytest
from bench_quantize import Clock, whole_s


def test_a_part_leaves_out_the_parts_inside_it(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 10.0])  # enter forward, enter moments, leave it, leave forward
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock("cpu")
    inner = clock.timed("moments", lambda: 5)
    assert clock.timed("forward", inner)() == 5
    assert (clock.seconds["forward"], clock.seconds["moments"]) == (1.0 + 6.0, 3.0)


def test_the_whole_model_takes_what_a_further_layer_takes():
    small, large = {"layers": 2, "total_s": 10.0}, {"layers": 4, "total_s": 16.0}
    assert whole_s(small, large, 28) == 10 + 3 * 26


def test_it_measures_a_small_model(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["bench_quantize.py", "--shape", "tiny-qwen2", "--layers", "1", "2", "--out", str(out)]
    )
    bench_quantize.main()
    found = json.loads(out.read_text())
    assert capsys.readouterr().out.endswith(out.read_text())
    for run, layers in zip(found["runs"], (1, 2), strict=True):
        assert (run["layers"], run["method"], run["start"]["rank"]) == (layers, "search_gptq", 64)
        assert min(run["seconds"][part] for part in ("forward", "moments", "measure")) > 0
        assert sum(run["seconds"].values()) == pytest.approx(run["total_s"], abs=0.1)
