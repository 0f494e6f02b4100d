"""bench_linear.py: the bytes it counts as needed, the way it takes for the engine's, and its sums.

With `-m gpu` a test measures a small layer.
"""

import pytest
import torch

from qerl.formats.cuda.nvrtc import has_kernels
from qerl.formats.nvfp4 import tuning
from scripts.bench import bench_linear
from scripts.bench.linear_ways import WAYS, Linear, linears, random_adapter

SMALL = Linear("qkv", (256, 64, 64), 512, 16)
LIMITS = {"gb_per_s": 4000.0, "tflops": 700.0}


def test_the_linears_of_qwen2_7b_with_rank_24_that_the_engine_pads():
    qkv, o, gate_up, down = linears("qwen2.5-7b", 24)
    assert (qkv.parts, qkv.columns, qkv.part_rank) == ((3584, 512, 512), 3584, 32)
    assert (o.rows, o.columns, gate_up.rows, gate_up.columns) == (3584, 3584, 2 * 18944, 3584)
    assert (down.rows, down.columns, down.adapter_numbers) == (3584, 18944, 32 * (18944 + 3584))


@pytest.mark.parametrize(
    ("way", "adapter", "weight_bytes", "outs"),
    [("fused", False, 9 / 16, 1), ("decoded", True, 9 / 16, 1), ("bf16", True, 2, 1), ("adapter", True, 0, 2)],
)
def test_needed_bytes_and_flops_equal_those_counted_by_hand(way, adapter, weight_bytes, outs):
    """Counted are x, out, the weight, A of three parts, and B's blocks: 384 rows, 512 columns, rank 16, 5 tokens."""
    numbers = 16 * (3 * 512 + 384) if adapter else 0
    weight = 384 * 512
    size, flops = SMALL.needs(way, 5, adapter)
    assert size == weight * weight_bytes + 2 * (5 * 512 + outs * 5 * 384 + numbers)
    assert flops == 2 * 5 * (weight * (weight_bytes > 0) + numbers)


@pytest.mark.parametrize(("tokens", "us", "of"), [(1, 67.92, "bytes"), (256, 99.32, "flops")])
def test_memory_is_the_limit_for_few_tokens_and_arithmetic_for_many(tokens, us, of):
    """37888 x 3584 in bfloat16 are 271.6 MB at 4 TB/s, and 69.5 GFLOP at 700 TFLOP/s."""
    gate_up = linears("qwen2.5-7b", 32)[2]
    assert gate_up.limit("bf16", tokens, False, LIMITS) == (pytest.approx(us, rel=2e-3), of)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_bf16_way_is_compared_with_its_twin(adapted):
    torch.manual_seed(0)
    weight, adapter = WAYS["bf16"].make(SMALL, 8, "cpu"), random_adapter(SMALL, "cpu")
    x = torch.randn(8, 512).bfloat16()
    row = bench_linear.compared("bf16", weight, x, adapter if adapted else None)
    assert 1e-4 < row["error"] < 5e-3
    assert row["repeats"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "0"], "0 is less than 1"),
        (["--tokens", "8", "-1"], "-1"),
        (["--shape", "gpt-2"], "invalid choice"),
        (["--rank", "x"], "invalid"),
    ],
)
def test_impossible_arguments_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        bench_linear.options(words)
    assert said in capsys.readouterr().err


def row(linear, tokens, way, adapter, us, **changes):
    sizes = {"qkv": (4608, 3584), "down": (3584, 18944)}[linear]
    made = {"linear": linear, "rows": sizes[0], "columns": sizes[1], "tokens": tokens, "way": way, "adapter": adapter}
    return made | {"us": us, "limit_us": 3.0, "limited_by": "bytes", "error": 0.002, "share": 3 / us} | changes


def results():
    """Two linears at 8 and 256 tokens. Our product is the engine's default, once the fastest there but wrong."""
    times = {
        ("qkv", 8): {"fused": (10, 12), "humming": (9, 20), "bf16": (20, 30)},
        ("down", 8): {"fused": (20, 24), "humming": (30, 40), "bf16": (50, 60)},
        ("qkv", 256): {"fused": (16, 21), "decoded": (15, 50), "bf16": (20, 30)},
        ("down", 256): {"fused": (4, 5), "decoded": (90, 99), "bf16": (50, 60)},
    }
    wrong = {"error": 0.26}
    made = [
        row(linear, tokens, way, adapter, us, **(wrong if us < 6 else {}))
        for (linear, tokens), ways in times.items()
        for way, both in ways.items()
        for adapter, us in zip((False, True), both, strict=True)
    ]
    return [*made, row("qkv", 8, "adapter", True, 6.0)]


def test_a_layer_is_summed_over_the_engines_ways_and_over_the_fastest_correct_ones():
    sums = {(s["tokens"], s["choice"]): s for s in bench_linear.layer_sums(results())}
    assert list(sums) == [(8, "default"), (8, "fastest"), (8, "humming"), (256, "default"), (256, "fastest")]
    few = sums[8, "default"]
    assert (few["us"], few["without_lora_us"], few["bf16_us"], few["bf16_lora_us"]) == (36, 30, 70, 90)
    assert few["over_bf16_lora"] == 2.5
    assert few["lora_cost"] == pytest.approx(0.2)
    assert few["bf16_lora_cost"] == pytest.approx(2 / 7)
    assert few["share"] == pytest.approx(6 / 36)
    assert (sums[8, "humming"]["us"], sums[8, "humming"]["without_lora_us"]) == (60, 39)
    assert sums[256, "default"]["ways"] == {"qkv": "fused", "down": "fused"}
    assert sums[256, "fastest"]["ways"] == {"qkv": "fused", "down": "decoded"}
    assert sums[256, "fastest"]["us"] == 21 + 99
    assert sums[256, "fastest"]["without_lora_us"] == 15 + 90


@pytest.mark.parametrize("layer_bytes", [1000, 10**7, 2**28, 10**9])
def test_layers_that_take_turns_do_not_fit_into_the_cache_together(layer_bytes):
    number = tuning.cold_layers(layer_bytes)
    assert number * layer_bytes > tuning.CACHE_BYTES
    assert (number - 1) * layer_bytes <= tuning.CACHE_BYTES


@pytest.mark.gpu  # last passed on an H200 on 2026-11-22, vLLM 0.25.1
def test_a_small_layer_is_measured_right_in_every_way():
    rows = list(bench_linear.measured(Linear("qkv", (768, 128, 128), 1024, 16), [1, 33, 64], LIMITS))
    ways = {r["way"] for r in rows}
    assert ways >= {"decoded", "bf16"}
    assert not has_kernels(torch.device("cuda", 0)) or ways >= {"fused", "adapter"}
    assert all(r["error"] < 1e-2 and r["us"] > 0.5 for r in rows)
    assert all(r["repeats"] for r in rows if r["way"] in ("fused", "adapter", "decoded"))
