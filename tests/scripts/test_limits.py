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
    assert training_flops(work, step, weights=True) == flops + 2 * BODY * (16 * 100 + 128 * 50)


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


ATTENTION = 48 * 2048 * 128 * (2 * 32 + 2 * 4)  # of Qwen3-30B-A3B: q and o, k and v
EXPERTS = 48 * 128 * 3 * 2048 * 768
ROUTERS = 48 * 128 * 2048
A3B_HEAD = 151936 * 2048
OF_ATTENTION = 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))  # an adapter of rank 16
OF_EXPERTS = 48 * 16 * (2 * 2048 + 128 * 3 * 768)  # with shared outer factors
A3B_KV = 96 * 2**10


def test_of_experts_a_token_needs_those_that_it_gets_and_a_step_those_that_its_sequences_choose():
    """8 of 128: one sequence reads 1/16 of them, two 1/16 + 15/256 if all are chosen alike. Routers are frozen."""
    values = ("adapter.rank=16", "data.max_prompt_tokens=10", "rollout.prompts_per_step=1", "rollout.group_size=2")
    config = load_recipe("dapo_30b_a3b", values)
    work = Work.of(config, read_sizes("Qwen/Qwen3-30B-A3B"))
    met, per_token = ATTENTION + EXPERTS / 16, ROUTERS + A3B_HEAD + OF_ATTENTION + OF_EXPERTS / 16
    step = {"completions/mean_tokens": 50.0}
    assert training_flops(work, step) == 110 * (4 * met + 2 * ROUTERS) + 100 * 4 * A3B_HEAD
    need, both = rollout_need(work, [2, 1]), 1 / 16 + 15 / 256
    assert need["bytes"] == pytest.approx(
        {
            "weights": (2 * ATTENTION + EXPERTS * (both + 1 / 16)) * 9 / 16 + 2 * 2 * (A3B_HEAD + ROUTERS),
            "adapter": 2 * (2 * OF_ATTENTION + OF_EXPERTS * (both + 1 / 16)),
            "keys and values": 11 * A3B_KV,
        }
    )
    assert need["flops"] == 2 * 3 * (met + per_token) + 2 * 10 * (met + ROUTERS)


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


def test_a_decode_step_of_a_folder_with_experts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["qwen3-30b-a3b"]), encoding="utf-8")
    need = decode_need(str(tmp_path), 16, 256, 100)
    assert need["bytes"]["weights"] == pytest.approx(2 * (ATTENTION + EXPERTS + A3B_HEAD + ROUTERS), rel=1e-6)
    assert need["bytes"]["adapter"] == pytest.approx(2 * (OF_ATTENTION + OF_EXPERTS), rel=1e-6)
    active = ATTENTION + ROUTERS + A3B_HEAD + OF_ATTENTION + (EXPERTS + OF_EXPERTS) / 16
    assert need["flops"] == pytest.approx(2 * 256 * active)


def test_shares_add_up_the_bytes_that_are_read():
    need = {"bytes": {"weights": 3e9, "keys and values": 1e9}, "flops": 6e12}
    found = shares(need, 2.0, {"gb_per_s": 4.0, "tflops": 10.0})
    assert found["needed_gb"] == {"weights": 3.0, "keys and values": 1.0}
    assert found["needed_tflop"] == 6.0
    assert found["share_of_bandwidth"] == pytest.approx(0.5)
    assert found["share_of_matrix_rate"] == pytest.approx(0.3)
