"""The plan of a run on given conversations: one base, no engine, and what to lower if it does not fit."""

from qerl.cli.plan import sentences
from qerl.config.recipe import load_recipe
from qerl.plan.engine_memory import card_of
from qerl.plan.sizes import KNOWN, sizes_of
from training.preflight.advice import advice, duration, likely
from training.preflight.plan import plan

SIZES = sizes_of(KNOWN["qwen2.5-7b"], "qwen2.5-7b")


def test_nothing_of_an_engine_is_planned():
    config = load_recipe("sft_7b")
    made = plan(config, SIZES, card_of("h200"))
    assert list(made.memory) == list(made.seconds) == ["training"]
    assert made.memory["training"]["weights"] == int(SIZES.weights_bytes("nvfp4"))
    assert set(made.memory["training"]) == {"weights", "adapter", "optimizer", "context", "kernels", "micro-batch"}
    assert made.peak("training") <= made.limit
    assert "Nothing is sampled" in sentences(config, made)[-1]
    assert "if every row has sft.max_tokens tokens" in duration(config, made, likely(config))[0]


def test_seconds_are_those_of_the_flops_by_the_cost_model():
    config = load_recipe("sft_7b", ["run.gradient_checkpointing=false", "run.micro_batch_tokens=4096"])
    made = plan(config, SIZES, card_of("h200"))
    tokens = 64 * 4096
    flops = 4 * (SIZES.body + SIZES.head) * tokens
    assert made.seconds["training"] == flops / (0.74 * card_of("h200").tflops * 1e12)


def test_a_card_that_is_too_small_gets_advice_about_rows():
    config = load_recipe("sft_7b", ["run.gradient_checkpointing=false"])
    made = plan(config, SIZES, card_of("12"))
    assert "lower sft.max_tokens" in made.problems[0]
    assert any(
        "sft.max_tokens=" in change or "gradient_checkpointing=auto" in change
        for change in advice(config, SIZES, card_of("12"))
    )
