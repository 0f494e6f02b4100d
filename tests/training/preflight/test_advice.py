"""What `qerl plan` advises if a run does not fit, and the cards it knows."""

import json
import re

import pytest
from plan_check import Workload

from qerl.checkpoint.shards import TensorInfo
from qerl.cli.plan import this_card
from qerl.config.recipe import load_recipe, recipe_names
from qerl.engine.vllm.opening import Settings
from qerl.plan.engine_memory import CARDS, card_of
from qerl.plan.sizes import KNOWN, read_sizes
from training.preflight.advice import advice, largest_completion
from training.preflight.plan import plan, trainer_bytes, with_values
from training.run import engine_options

GIB = 2**30


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ([], "take a smaller base"),
        (["rollout.memory=0.9"], "take a smaller base"),
        (["model.format=bf16", "noise.enabled=false"], "take a smaller or quantized base"),
    ],
)
def test_if_a_run_does_not_fit_cause_and_remedy_are_named(settings, remedy):
    """A quantized base is no remedy if the base is NVFP4 already."""
    made = plan(load_recipe("dapo_32b", settings), read_sizes("Qwen/Qwen2.5-32B"), card_of("16"))
    assert any(remedy in problem for problem in made.problems), made.problems


@pytest.mark.parametrize("gpu", ["8", "10", "12"])
def test_the_default_budget_leaves_room_for_what_lies_outside_it(gpu):
    made = plan(load_recipe("dapo_3b", []), read_sizes("Qwen/Qwen2.5-3B"), card_of(gpu))
    assert made.problems == ()
    assert made.peak("rollout") <= made.limit


@pytest.mark.parametrize("name", CARDS)
def test_every_card_trains_a_3b_model(name):
    assert not Workload("dapo_3b", "Qwen/Qwen2.5-3B", 16, 8, 256, 1024, 32).plan(name).problems


@pytest.mark.parametrize(("memory", "said"), [("1.0", "0.91"), ("23.5", "21.6")])
def test_a_budget_without_room_is_a_problem_and_the_advised_one_is_not(memory, said):
    """A 4090 has 23.6 GiB. Outside of the budget are 0.5 + 1.25 + 0.6 - 1 for the engine, 160 MB of counts, and float32
    LoRA of rank 32 with its 8-bit state."""
    config, sizes = load_recipe("dapo_7b", [f"rollout.memory={memory}"]), read_sizes("Qwen/Qwen2.5-7B")
    made = plan(config, sizes, card_of("4090"))
    (problem,) = made.problems
    assert problem.endswith(f"lower rollout.memory to {said}")
    lower = load_recipe("dapo_7b", [f"rollout.memory={said}"])
    assert plan(lower, sizes, card_of("4090")).problems == ()
    above = load_recipe("dapo_7b", [f"rollout.memory={float(said) + (0.01 if memory == '1.0' else 0.1)}"])
    assert plan(above, sizes, card_of("4090")).problems
    assert "--set rollout.memory=null" in advice(config, sizes, card_of("4090"))


@pytest.mark.parametrize(
    ("recipe", "values", "gib"),
    [
        ("dapo_7b", [], 80),
        ("dapo_7b", [], 12),
        ("dapo_7b", ["memory.cap_gib=14"], 80),
        ("dapo_7b", ["rollout.memory=0.8"], 24),
        ("dapo_7b", ["rollout.memory=20"], 24),
        ("dapo_30b_a3b", [], 80),  # leaves room for what the routers chose
    ],
)
def test_the_engine_takes_the_budget_that_was_planned(tmp_path, monkeypatch, recipe, values, gib):
    """In all cases vLLM's profile sizes the cache. A tensor of the right length takes the place of the weights."""
    monkeypatch.setattr("qerl.engine.vllm.opening.check_experts_served", lambda *_: None)
    config = load_recipe(recipe, values)
    known = KNOWN["qwen2.5-7b" if recipe == "dapo_7b" else "qwen3-30b-a3b"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "quantization_config": {}, **known}))
    sizes = read_sizes(str(tmp_path))
    weights = int(sizes.weights_bytes("nvfp4"))
    for module in ("opening", "sync"):
        stored = {"weights": TensorInfo("U8", (weights,), tmp_path / "model.safetensors", weights)}
        monkeypatch.setattr(f"qerl.engine.vllm.{module}.read_tensors", lambda _, stored=stored: stored)
    options = engine_options(config, trainer_bytes(config, sizes))
    arguments = Settings(str(tmp_path), "nvfp4", options).memory_arguments(gib * GIB)
    assert arguments["kv_cache_memory_bytes"] is None
    made = plan(config, sizes, card_of(str(gib)))
    parts = made.memory["rollout"]
    planned = parts["weights"] + parts["KV cache"] + parts["engine's work"]
    within = 2 if recipe == "dapo_7b" else 0.02 * GIB
    assert arguments["gpu_memory_utilization"] * gib * GIB == pytest.approx(planned, abs=within)
    beside = Settings(str(tmp_path), "nvfp4", options).memory_arguments((gib + 40) * GIB, others=40 * GIB)
    assert beside["gpu_memory_utilization"] * (gib + 40) * GIB == pytest.approx(planned, abs=within)


@pytest.mark.parametrize(
    ("reported", "gib", "gb_per_s"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU, 16376", 16.0, 857),
        ("NVIDIA A100-SXM4-40GB, 40960", 39.4, 1322),
        ("NVIDIA GeForce GTX 1060, 12288", 12.0, 306),
    ],
)
def test_this_card_has_the_memory_that_it_reports(tmp_path, monkeypatch, reported, gib, gb_per_s):
    tool = tmp_path / "nvidia-smi"
    name, total = reported.split(", ")
    tool.write_text(f"#!/bin/sh\necho '0, GPU-1, {name}, 100, {total}, [N/A]'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    card = this_card()
    assert (card.memory_gib, card.gb_per_s) == (gib, gb_per_s)


RECIPES = [name for name in recipe_names() if name != "tiny"]


@pytest.mark.parametrize("gpu", ["24", "h100"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_or_says_what_makes_it_fit(recipe, gpu):
    """The advice is read back as options of `qerl train`, and planned again."""
    config, card = load_recipe(recipe, []), card_of(gpu)
    sizes = read_sizes(config.model.base)
    found = advice(config, sizes, card)
    if not plan(config, sizes, card).problems:
        assert found == []
        return
    assert found
    for options in (each.split() for each in found if each.startswith("--")):
        values = dict(zip(options[::2], options[1::2], strict=True)) if options[0] == "--model" else {}
        changed = load_recipe(recipe, [word for word in options if "=" in word], base=values.get("--model"))
        assert plan(changed, read_sizes(changed.model.base), card).problems == (), options
    needed = [each.partition(" GiB")[0] for each in found if "of GPU memory" in each]
    assert needed
    assert plan(config, sizes, card_of(needed[0])).problems == ()
    assert plan(config, sizes, card_of(str(int(needed[0]) - 1))).problems


def test_the_longest_completion_just_fits():
    config, card = load_recipe("dapo_7b", []), card_of("24")
    sizes = read_sizes(config.model.base)
    longest = largest_completion(config, sizes, card)
    assert longest >= config.rollout.max_new_tokens
    made = [plan(with_values(config, {"rollout.max_new_tokens": n}), sizes, card) for n in (longest, longest + 256)]
    assert [bool(each.problems) for each in made] == [False, True]
    assert largest_completion(config, sizes, CARDS["h200"]) == 32768 - 1024  # the limit are the positions of the model


def test_with_a_cap_on_a_large_enough_card_the_advice_is_a_higher_cap_not_another_card():
    config, card = load_recipe("dapo_7b", ["memory.cap_gib=10"]), card_of("24")
    sizes = read_sizes(config.model.base)
    found = advice(config, sizes, card)
    assert not any("of GPU memory" in line for line in found)
    (cap,) = [int(line.rpartition("=")[2]) for line in found if re.fullmatch(r"--set memory\.cap_gib=\d+", line)]
    planned = [plan(with_values(config, {"memory.cap_gib": float(gib)}), sizes, card) for gib in (cap - 1, cap)]
    assert [bool(each.problems) for each in planned] == [True, False]


def test_masters_that_do_not_fit_become_leaner_or_fewer():
    settings = ("qat.masters=float32", "optim.name=adamw")
    config, sizes, card = load_recipe("qat_7b", settings), read_sizes("Qwen/Qwen2.5-7B"), card_of("h100")
    found = advice(config, sizes, card)
    assert found[0] == "--set qat.masters=bfloat16 --set optim.name=adamw_8bit"
    sixteen = advice(load_recipe("qat_7b", ["qat.masters=bfloat16"]), sizes, card_of("a6000"))
    assert any("--set \"qat.targets=['re:.*mlp.*']\"" in each for each in sixteen), sixteen
    load_recipe("qat_7b", ["qat.targets=['re:.*mlp.*']"])
