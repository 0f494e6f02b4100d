"""What a recipe asks of the engine reaches it."""

from qerl.config.recipe import load_recipe
from qerl.engine.options import EngineOptions
from training.run import engine_options

RECIPE = {
    "rollout.engine": "vllm",
    "model.trust_remote_code": True,
    "rollout.kernel": "marlin",
    "rollout.memory": 0.5,
    "memory.cap_gib": 24.0,
    "rollout.kv_cache_dtype": "fp8",
    "adapter.rank": 16,
    "run.seed": 7,
}


def test_what_a_recipe_asks_of_the_engine_reaches_it():
    lengths = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=200"]
    config = load_recipe("dapo_7b", [f"{key}={value}" for key, value in RECIPE.items()] + lengths)
    options = engine_options(config, 5)
    assert options == EngineOptions(
        engine="vllm",
        trust_remote_code=True,
        records_experts=True,
        batch_size=config.rollout.prompts_per_step * config.rollout.group_size,
        kernel="marlin",
        memory=0.5,
        cap_gib=24.0,
        trainer_bytes=5,
        kv_cache_dtype="fp8",
        max_context=300,
        max_rank=16,
        expert_rank=16,
        seed=7,
    )
