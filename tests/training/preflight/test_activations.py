"""What the plan says of activations in 4 bits: seconds against the kernel's measurement, calibration, the warning."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qerl.checkpoint.activations import GRPO_WARNING
from qerl.cli.plan import sentences
from qerl.config.recipe import load_recipe
from qerl.plan.engine_memory import card_of
from qerl.plan.sizes import CALIBRATING, KNOWN, read_sizes, rounding_seconds, sizes_of
from training.preflight.plan import plan

MEASURED = json.loads((Path(__file__).resolve().parents[3] / "benchmarks/qat/activations-7b.json").read_text())
BASE, CARD = "Qwen/Qwen2.5-7B-Instruct", "h200"
GIB = 2**30


def planned(recipe, *overrides, card=CARD, sizes=None):
    config = load_recipe(recipe, overrides)
    return config, plan(config, sizes or read_sizes(BASE), card_of(card))


def folder_sizes(inputs):
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "input_activations": inputs}
    entry = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"a": group}}
    return sizes_of({**KNOWN["qwen2.5-7b"], "quantization_config": entry}, "folder")


def test_rounding_takes_as_long_as_was_measured():
    """A decode step of some tokens, and a layer in training."""
    sizes, us = read_sizes(BASE), {name: row["us"] for name, row in MEASURED["results"].items()}
    for tokens in (1, 8, 64, 256):
        seconds = rounding_seconds(sizes, card_of(CARD), tokens)
        assert 1e6 * seconds == pytest.approx(us[f"dynamic, {tokens} tokens decoded"], rel=0.08)
    layer = 3 * us["dynamic, 8448 x 3584"] + us["dynamic, 8448 x 18944"]
    assert 1e6 * rounding_seconds(replace(sizes, layers=1), card_of(CARD), 8448) == pytest.approx(layer, rel=0.08)


def test_rounding_takes_time_in_every_phase_and_calibration_happens_before_them():
    plain, dynamic, static = (
        planned("qat_7b", f"qat.quant_cfg={name}")[1] for name in ("nvfp4_w4a16", "nvfp4_w4a4", "nvfp4_w4a4_static")
    )
    for phase, seconds in plain.seconds.items():
        assert seconds < dynamic.seconds[phase] < 1.5 * seconds
    assert dynamic.seconds == static.seconds
    assert CALIBRATING not in dynamic.memory
    assert static.memory[CALIBRATING]["16-bit model"] == read_sizes(BASE).weights_bytes("bf16")
    assert static.peak(CALIBRATING) / GIB == pytest.approx(16.0, abs=0.5)


def test_a_16_bit_model_that_does_not_fit_is_named_before_anything_is_loaded():
    sizes = sizes_of(KNOWN["qwen2.5-14b"], "14b")
    asked = ("qat.mode=adapter", "qat.quant_cfg=nvfp4_w4a4_static", "qat.start_in=host", "rollout.max_new_tokens=512")
    _, made = planned("dapo_7b", *asked, card="24", sizes=sizes)
    (problem,) = [each for each in made.found if "calibrating" in each.text]
    assert problem.text.startswith("calibrating activations takes 29.")
    assert "nvfp4_w4a4)" in problem.text
    assert problem.needed > problem.available == made.limit


def test_rows_are_the_run_s_own_prompts_or_those_that_the_recipe_names(tmp_path):
    keys = ("qat.quant_cfg=nvfp4_w4a4_static", "data.max_prompt_tokens=300")
    own = sentences(*planned("qat_7b", *keys))
    assert any("reads 512 rows of 300 tokens at most" in line for line in own)
    named = sentences(*planned("qat_7b", *keys, "qat.quant_cfg.calibration.data=rows.jsonl"))
    assert any("reads 512 rows of 2048 tokens at most" in line for line in named)


@pytest.mark.parametrize(
    ("inputs", "rounds"),
    [
        (None, False),
        ({"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "dynamic": "local"}, True),
        ({"num_bits": 4, "type": "float", "group_size": 16, "strategy": "group", "dynamic": True}, True),
    ],
)
def test_a_base_says_by_its_config_whether_inputs_are_rounded(inputs, rounds):
    config, made = planned("dapo_7b", sizes=folder_sizes(inputs))
    plain = planned("dapo_7b")[1]
    assert (made.seconds["rollout"] > plain.seconds["rollout"]) == rounds
    assert (f"Note: {GRPO_WARNING}." in sentences(config, made)) == rounds
    distilled = planned("qad_1_7b", "qat.quant_cfg=nvfp4_w4a4", sizes=read_sizes("Qwen/Qwen3-1.7B"))
    assert not any(GRPO_WARNING in line for line in sentences(*distilled))
