"""What the plan counts for `train.fp8_recipe`: sums by hand, in the plan and in the run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qerl.config.recipe import load_recipe
from qerl.plan.engine_memory import card_of
from qerl.plan.micro_batch_plan import Shapes
from qerl.plan.sizes import read_sizes, rounding_work
from training.policy.train_memory import footprint_of
from training.preflight.plan import plan, wishes_of

SEVEN_B = Shapes(3584, 18944, 3584, 512, 28, 152064, 32, 80_740_352)
# Gate and up have 2 x 18944 = 37888 columns of 3584 features: 135,790,592 weights.
BY_HAND = {
    # codes of dy 37888 - 37888 + 7168; the weight's codes, turned
    "tensorwise": (7_168, 135_790_592),
    # codes of dy 37888 + 296 scales of 4 bytes - 37888 + 7168; (1 + 1) x 135,790,592
    "blockwise": (8_352, 271_581_184),
    None: (0, 0),
}
# codes of dy, also turned, 2 x 37888 - 37888 + 7168; 4 x 67,895,296 of a master's gradient
WITH_MASTERS = BY_HAND | {"tensorwise": (45_056, 271_581_184)}


@pytest.mark.parametrize("gradient_bytes", [0, 4])
@pytest.mark.parametrize("recipe", BY_HAND)
def test_the_temporaries_of_a_recipe_are_in_a_micro_batch(recipe, gradient_bytes):
    token, weight = (WITH_MASTERS if gradient_bytes else BY_HAND)[recipe]
    assert rounding_work(recipe, 3584, 18944, gradient_bytes > 0) == (token, weight)
    shapes = replace(SEVEN_B, gradient_bytes=gradient_bytes)
    plain, rounded = shapes.footprint(), replace(shapes, fp8_recipe=recipe).footprint()
    assert rounded == replace(plain, working=plain.working + token, fixed=plain.fixed + weight)
    assert rounded.needed(16384, 0) - plain.needed(16384, 0) == 16384 * token + weight


@pytest.mark.parametrize("base", ["model.format=bf16", "qat.mode=weights"])
def test_the_plan_of_a_run_has_them(base):
    def planned(*overrides):
        fixed = ("rollout.max_new_tokens=512", "run.micro_batch_tokens=16384", "run.gradient_checkpointing=false")
        config = load_recipe("qat_7b" if "qat" in base else "dapo_7b", (base, *fixed, *overrides))
        return plan(config, read_sizes("Qwen/Qwen2.5-7B-Instruct"), card_of("h200"))

    plain, found = planned(), {name: planned(f"train.fp8_recipe={name}") for name in ("tensorwise", "blockwise")}
    more = {name: each.peak("training") - plain.peak("training") for name, each in found.items()}
    by_hand = WITH_MASTERS if "qat" in base else BY_HAND
    tokens = {(bytes_ - by_hand[name][1]) / by_hand[name][0] for name, bytes_ in more.items()}
    assert len(tokens) == 1  # of the step's largest micro-batch
    assert 0.9 * 16384 < tokens.pop() <= 16384
    assert all(each.peak("rollout") == plain.peak("rollout") for each in found.values())


@pytest.mark.parametrize("recipe", BY_HAND)
def test_a_run_counts_what_its_plan_counts(recipe):
    from transformers import Qwen2Config

    config = Qwen2Config(
        num_attention_heads=28, hidden_size=3584, intermediate_size=18944, num_key_value_heads=4,
        num_hidden_layers=28, vocab_size=152064,
    )  # fmt: skip
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    trained = torch.empty(80_740_352, device="meta")
    policy = SimpleNamespace(base_model=model, parameters=lambda: [trained], trained_bytes=16.0)
    recipes = ("model.format=bf16", f"train.fp8_recipe={recipe or 'null'}")
    found = footprint_of(policy, wishes_of(load_recipe("dapo_7b", recipes)), 32, entropy_gradient=False)
    assert found == replace(SEVEN_B, fp8_recipe=recipe).footprint()
