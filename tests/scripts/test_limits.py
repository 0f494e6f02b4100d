"""The work of a step equals what we count by hand, as do the shares of the limits."""

import json
from pathlib import Path

import pytest

from qerl.config.recipe import load_recipe
from qerl.formats import NVFP4
from qerl.plan.sizes import KNOWN, read_sizes
from scripts.bench.limits import Work, decode_need, rollout_need, shares, train_share, training_flops

BODY = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 3584 * 18944)  # q and o, k and v, gate, up and down of Qwen2.5-7B
HEAD = 152064 * 3584
ADAPTER = 28 * 32 * (2 * 7168 + 2 * 4096 + 3 * (3584 + 18944))  # rank 32: inputs and outputs of the same seven linears
KV = 28 * 2 * 4 * 128 * 2  # layers, keys and values, heads, width, bytes


def workload(*values):
    config = load_recipe("dapo_7b", ["rollout.prompts_per_step=16", "rollout.group_size=8", "adapter.rank=32", *values])
    return Work.of(config, read_sizes("Qwen/Qwen2.5-7B"))


def test_training_counts_prompts_once_completions_in_the_head_and_only_trained_rows():
    work = workload("data.max_prompt_tokens=100")
    step = {"completions/mean_tokens": 50.0, "time/train_s": 2.0}
    flops = 4 * (BODY * (16 * 100 + 128 * 50) + HEAD * 128 * 50)
    assert training_flops(work, step) == flops
    assert training_flops(work, step | {"completions/trained_share": 0.75}) == 0.75 * flops
    assert train_share(work, step, 400.0) == pytest.approx(flops / 800e12)


def test_the_profile_of_the_benchmarks_is_counted_as_before():
    report = json.loads((Path(__file__).parents[2] / "benchmarks/profile-step-7b.json").read_text(encoding="utf-8"))
    counted = training_flops(workload("data.max_prompt_tokens=128"), report["steps"][1])
    assert counted / 1e12 == pytest.approx(report["phases"]["training"]["needed_tflop"])


def test_a_rollout_reads_the_weights_each_step_and_the_cache_that_each_token_attends_to():
    """A completion of 3 tokens takes two steps, which attend to 10 + 1 and 10 + 2 tokens; one of 1 token takes none."""
    work = workload("data.max_prompt_tokens=10")
    need = rollout_need(work, [3, 1])
    assert need["bytes"] == {
        "weights": 3 * (BODY * 9 / 16 + 2 * HEAD),
        "adapter": 3 * 2 * ADAPTER,
        "keys and values": (11 + 12) * KV,
    }
    assert need["flops"] == 2 * (BODY + HEAD + ADAPTER) * 4 + 2 * BODY * 16 * 10


@pytest.mark.parametrize(("count", "steps"), [(256, 2), (257, 3), (512, 4)])
def test_more_sequences_than_fit_at_once_take_more_steps(count, steps):
    need = rollout_need(workload(), [2] * count)
    assert need["bytes"]["weights"] == steps * (BODY * 9 / 16 + 2 * HEAD)


def test_a_16_bit_base_and_an_8_bit_cache_count_with_their_own_bytes():
    need = rollout_need(workload("model.format=bf16", "rollout.kv_cache_dtype=fp8", "data.max_prompt_tokens=10"), [2])
    assert need["bytes"]["weights"] == 2 * 2 * (BODY + HEAD)
    assert need["bytes"]["keys and values"] == 11 * KV / 2


@pytest.mark.parametrize(("packed", "width"), [(True, 9 / 16), (False, 2)])
def test_a_decode_step_of_a_model_folder(tmp_path, packed, width):
    quantization = {"quantization_config": NVFP4.quantization_config(["lm_head"])} if packed else {}
    config = {**KNOWN["qwen2.5-7b"], **quantization}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    need = decode_need(str(tmp_path), 32, 8, 152.5)
    assert need["bytes"] == {
        "weights": BODY * width + 2 * HEAD,
        "adapter": 2 * ADAPTER,
        "keys and values": 8 * 152.5 * KV,
    }
    assert need["flops"] == 8 * 2 * (BODY + HEAD + ADAPTER)


def test_shares_add_up_the_bytes_that_are_read():
    need = {"bytes": {"weights": 3e9, "keys and values": 1e9}, "flops": 6e12}
    found = shares(need, 2.0, {"gb_per_s": 4.0, "tflops": 10.0})
    assert found["needed_gb"] == {"weights": 3.0, "keys and values": 1.0}
    assert found["needed_tflop"] == 6.0
    assert found["share_of_bandwidth"] == pytest.approx(0.5)
    assert found["share_of_matrix_rate"] == pytest.approx(0.3)
