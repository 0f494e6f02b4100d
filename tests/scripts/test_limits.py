"""The work of a step equals what we count by hand, as do the shares of the limits."""

import json
from pathlib import Path

import pytest

from qerl.config.recipe import load_recipe
from qerl.plan.sizes import read_sizes
from scripts.bench.limits import Work, train_share, training_flops

BODY = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 3584 * 18944)  # q and o, k and v, gate, up and down of Qwen2.5-7B
HEAD = 152064 * 3584


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


ATTENTION = 48 * 2048 * 128 * (2 * 32 + 2 * 4)  # of Qwen3-30B-A3B: q and o, k and v
EXPERTS = 48 * 128 * 3 * 2048 * 768
ROUTERS = 48 * 128 * 2048
A3B_HEAD = 151936 * 2048


def test_of_experts_a_token_needs_those_that_it_gets():
    """8 of 128. Routers are frozen."""
    values = ("adapter.rank=16", "data.max_prompt_tokens=10", "rollout.prompts_per_step=1", "rollout.group_size=2")
    config = load_recipe("dapo_30b_a3b", values)
    work = Work.of(config, read_sizes("Qwen/Qwen3-30B-A3B"))
    met = ATTENTION + EXPERTS / 16
    step = {"completions/mean_tokens": 50.0}
    assert training_flops(work, step) == 110 * (4 * met + 2 * ROUTERS) + 100 * 4 * A3B_HEAD
