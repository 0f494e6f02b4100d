"""Recipes with one mistake each: the error has to name its line, its key, its value and the remedy."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from qerl.base.errors import ConfigError
from qerl.config.keys import describe_config
from qerl.config.recipe import load_recipe
from qerl.config.schema import RunConfig
from tests.helpers.recipe_text import RECIPE, check_wrong_edit, edited

# (line of the recipe, edited line, what the error has to say besides the number of that line)
KEYS = [
    ("  rank: 32", "  rnk: 32", "adapter.rnk: unknown key; did you mean adapter.rank?"),
    ("rollout:", "rolout:", "rolout: unknown key; did you mean rollout?"),
    ("  learning_rate: 1e-5", "  lr: 1e-5", "optim.lr: unknown key; did you mean optim.learning_rate?"),
    ("  group_size: 8", "  num_generations: 8", "did you mean rollout.group_size?"),
    ("  kl_coef: 0.0", "  beta: 0.0", "loss.beta: unknown key; did you mean loss.kl_coef?"),
    ("  seed: 0", "  temperature: 0.7", "run.temperature: unknown key; did you mean rollout.temperature?"),
    ("    weight: 1.0", "    wieght: 1.0", "rewards.0.wieght: unknown key; did you mean rewards.0.weight?"),
    ("  seed: 0", "  xyzzy: 0", "run.xyzzy: unknown key; the keys here are steps, seed, micro_batch_tokens,"),
    ("  seed: 0", "  steps: 7", "run.steps stands twice (first in line 49); keep one of the two"),
    ("  seed: 0", "  7: 0", "'7' stands where a key belongs; write a key as text"),
]
TYPES = [
    ("  rank: 32", "  rank: thirty",
     "adapter.rank: got 'thirty' (text), expected whole number >= 1; the default is 32"),
    ("  rank: 32", "  rank: 32.0", "adapter.rank: got 32.0, expected whole number >= 1"),
    ("  rank: 32", "  rank: true", "adapter.rank: got true, expected whole number >= 1"),
    ("  rank: 32", "  rank: 0", "adapter.rank: got 0, expected whole number >= 1"),
    ("  rank: 32", "  rank: [32]", "adapter.rank: got the list [32], expected whole number"),
    ("  train_norms: false", "  train_norms: no", "got 'no' (text), expected true or false; the default is false"),
    ("  train_norms: false", "  train_norms: 1", "adapter.train_norms: got 1, expected true or false"),
    ("  learning_rate: 1e-5", "  learning_rate: '1e-5'", "got '1e-5' (text), expected number > 0 and < 1; the"),
    ("  learning_rate: 1e-5", "  learning_rate: 1e5", "optim.learning_rate: got 100000.0, expected number > 0 and < 1"),
    ("  learning_rate: 1e-5", "  learning_rate: .nan", "optim.learning_rate: got nan, expected number"),
    ("  learning_rate: 1e-5", "  learning_rate:", "optim.learning_rate: got null, expected number"),
    ("  format: nvfp4", "  format: nvfp8",
     "got 'nvfp8' (text), expected one of nvfp4, fp8_block, bf16, mixed; did you mean nvfp4?"),
    ("  base: Qwen/Qwen2.5-7B-Instruct", "  base: ''", "model.base: got '' (text), expected text"),
    ("  targets: [q_proj, v_proj]", "  targets: all-linear", "targets.0: got 'all-linear' (text), expected one of"),
    ("  targets: [q_proj, v_proj]", "  targets: []", "adapter.targets: got the list [], expected list of one of"),
    ("  targets: [q_proj, v_proj]", "  targets: [q_proj, lm_head]", "adapter.targets.1: got 'lm_head' (text)"),
    ("  type: dapo", "  type: dpo", "loss.type: got 'dpo' (text), expected one of dapo, grpo,"),
    ("  temperature: 1.0", "  temperature: 0", "rollout.temperature: got 0, expected number >= 0.01; the"),
    ("  top_p: 1.0", "  top_p: 1.5", "rollout.top_p: got 1.5, expected number > 0 and <= 1"),
    ("  group_size: 8", "  group_size: 1", "rollout.group_size: got 1, expected whole number >= 2; the default is 8"),
    ("  kl_coef: 0.0", "  kl_coef: -0.1", "loss.kl_coef: got -0.1, expected number >= 0"),
    ("  mismatch_gate: 0.003", "  mismatch_gate: 0", "loss.mismatch_gate: got 0, expected number > 0 or null"),
    ("  warmup_ratio: 0.1", "  warmup_ratio: 10", "optim.warmup_ratio: got 10, expected number >= 0 and < 1"),
    ("  steps: 100", "  steps: 1e2", "run.steps: got 100.0, expected whole number >= 1"),
]  # fmt: skip


def test_the_recipe_is_valid_before_it_is_edited(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    config = load_recipe(path)
    assert (config.optim.learning_rate, config.noise.sigma_end, config.loss.correction.floor) == (1e-5, 5e-4, None)


@pytest.mark.parametrize(("old", "new", "says"), KEYS + TYPES)
def test_a_wrong_edit_is_named_with_its_line(tmp_path, old, new, says):
    check_wrong_edit(tmp_path, old, new, says)


@pytest.mark.parametrize("old", ["  base: Qwen/Qwen2.5-7B-Instruct", "  task: gsm8k", "  steps: 100"])
def test_a_missing_required_key_is_named(tmp_path, old):
    path = edited(tmp_path, old, "")
    section = {"  base": "model", "  task": "data", "  steps": "run"}[old.split(":")[0]]
    key = f"{section}.{old.split(':')[0].strip()}"
    with pytest.raises(ConfigError, match=rf"{key}: missing; write {key} \((text|whole number >= 1): "):
        load_recipe(path)


def test_a_missing_section_and_the_number_of_further_mistakes_are_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {base: tiny}\ndata: {task: arith}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: run: missing; write run: and under it at least steps"):
        load_recipe(path)
    path.write_text(RECIPE.replace("rank: 32", "rnk: 32").replace("top_p: 1.0", "top_p: 2"))
    with pytest.raises(ConfigError, match=r"rnk: unknown key.*\(1 more after this one\)"):
        load_recipe(path)


def test_the_models_themselves_refuse_what_recipes_may_not_hold():
    with pytest.raises(ValidationError, match="there are fewer rows than a step takes"):
        RunConfig.model_validate(
            {"model": {"base": "tiny"}, "data": {"task": "arith", "limit": 7}, "run": {"steps": 20}}
        )
    config = load_recipe("tiny")
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 3


def test_the_table_of_keys_has_type_default_and_description_for_each_key():
    rows = {row.key: row for row in describe_config()}
    assert rows["optim.learning_rate"][1:3] == ("number > 0 and < 1", "1e-05")
    assert rows["rollout.memory"][1:3] == ("number > 0 or null", "null")
    assert rows["data.columns"][1] == "mapping or null"
    assert rows["rewards.N.name"][1:3] == ("text", "required")
    assert rows["adapter.targets"].default == "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
    assert rows["noise.enabled"][1:3] == ("true or false", "true")
    assert all(row.description for row in rows.values())
    assert len(rows) == len(describe_config())


def test_the_keys_need_only_the_folders_below():
    code = "import sys, qerl.config.schema; print(*(name for name in sys.modules if name.startswith('qerl.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[1] for name in loaded} == {"base", "formats", "config"}
    assert len(loaded) <= 30
