"""Recipes edited wrongly, one mistake each: the error has to name its line, its key, its value and the remedy."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from qerl.config.keys import describe_config
from qerl.config.recipe import load_recipe, recipe_names
from qerl.config.schema import RunConfig
from qerl.errors import ConfigError

RECIPE = """\
model:
  base: Qwen/Qwen2.5-7B-Instruct
  format: nvfp4
  dtype: auto
adapter:
  rank: 32
  targets: [q_proj, v_proj]
  train_norms: false
data:
  task: gsm8k
  prompt_template: default
  limit: 100
rewards:
  - name: accuracy
    weight: 1.0
  - name: soft_overlong
    args: {cache: 256}
rollout:
  engine: auto
  prompts_per_step: 16
  group_size: 8
  max_new_tokens: 1024
  temperature: 1.0
  top_p: 1.0
  kernel: auto
loss:
  type: dapo
  level: token
  clip_low: 0.2
  clip_high: 0.28
  delta: null
  kl_coef: 0.0
  num_iterations: 1
  correction:
    mode: token_truncate
    cap: 2.0
    floor: null
  mismatch_gate: 0.003
noise:
  enabled: true
  sigma_start: 1e-2
  sigma_end: 5e-4
  num_stages: 10
  where: rollout
optim:
  learning_rate: 1e-5
  warmup_ratio: 0.1
run:
  steps: 100
  seed: 0
  micro_batch_tokens: 8192
  save_every: 50
"""

# (line as it stands, line as edited, what the error has to say beside the edited line's number)
KEYS = [
    ("  rank: 32", "  rnk: 32", "adapter.rnk: unknown key; did you mean adapter.rank?"),
    ("rollout:", "rolout:", "rolout: unknown key; did you mean rollout?"),
    ("  learning_rate: 1e-5", "  lr: 1e-5", "optim.lr: unknown key; did you mean optim.learning_rate?"),
    ("  group_size: 8", "  num_generations: 8", "did you mean rollout.group_size?"),
    ("  kl_coef: 0.0", "  beta: 0.0", "loss.beta: unknown key; did you mean loss.kl_coef?"),
    ("  seed: 0", "  temperature: 0.7", "run.temperature: unknown key; did you mean rollout.temperature?"),
    ("    cap: 2.0", "    caps: 2.0", "loss.correction.caps: unknown key; did you mean loss.correction.cap?"),
    ("    weight: 1.0", "    wieght: 1.0", "rewards.0.wieght: unknown key; did you mean rewards.0.weight?"),
    ("  seed: 0", "  xyzzy: 0", "run.xyzzy: unknown key; the keys here are steps, seed, micro_batch_tokens,"),
    ("  seed: 0", "  micro_batch: 8", "run.micro_batch: unknown key; did you mean run.micro_batch_tokens?"),
    ("  seed: 0", "  steps: 7", "run.steps stands twice (first in line 49); keep one of the two"),
    ("  seed: 0", "  7: 0", "'7' stands where a key belongs; write a key as text"),
    ("  seed: 0", "\tseed: 0", "a tab begins or separates a value here; write spaces"),
    ("  seed: 0", "  seed: 0: 1", "a second colon in one value"),
    ("  seed: 0", "  seed: &zero 0", "an anchor or alias"),
    ("  seed: 0", "  seed: !!python/name:os.system x", "the tag"),
]
TYPES = [
    (
        "  rank: 32",
        "  rank: thirty",
        "adapter.rank: got 'thirty' (text), expected whole number >= 1; the default is 32",
    ),
    (
        "  rank: 32",
        "  rank: '32'",
        "adapter.rank: got '32' (text), expected whole number >= 1; write 32 without quotes",
    ),
    ("  rank: 32", "  rank: 32.0", "adapter.rank: got 32.0, expected whole number >= 1; write 32"),
    ("  rank: 32", "  rank: true", "adapter.rank: got true, expected whole number >= 1"),
    ("  rank: 32", "  rank: 0", "adapter.rank: got 0, expected whole number >= 1"),
    ("  rank: 32", "  rank: [32]", "adapter.rank: got the list [32], expected whole number"),
    ("  train_norms: false", "  train_norms: no", "got 'no' (text), expected true or false; write false"),
    ("  train_norms: false", "  train_norms: On", "got 'On' (text), expected true or false; write true"),
    ("  train_norms: false", "  train_norms: 1", "adapter.train_norms: got 1, expected true or false"),
    ("  learning_rate: 1e-5", "  learning_rate: '1e-5'", "got '1e-5' (text), expected number > 0 and < 1; write 1e-05"),
    ("  learning_rate: 1e-5", "  learning_rate: 1e5", "optim.learning_rate: got 100000.0, expected number > 0 and < 1"),
    ("  learning_rate: 1e-5", "  learning_rate: 1,5", "optim.learning_rate: got '1,5' (text), expected number"),
    ("  learning_rate: 1e-5", "  learning_rate: .nan", "optim.learning_rate: got nan, expected number"),
    ("  learning_rate: 1e-5", "  learning_rate:", "optim.learning_rate: got null, expected number"),
    ("  format: nvfp4", "  format: nvfp8", "got 'nvfp8' (text), expected one of nvfp4, bf16; did you mean nvfp4?"),
    ("  base: Qwen/Qwen2.5-7B-Instruct", "  base: 7", "model.base: got 7, expected text; write '7' in quotes"),
    ("  base: Qwen/Qwen2.5-7B-Instruct", "  base: ''", "model.base: got '' (text), expected text"),
    ("  targets: [q_proj, v_proj]", "  targets: q_proj", "got 'q_proj' (text), expected list of one of q_proj,"),
    ("  targets: [q_proj, v_proj]", "  targets: []", "adapter.targets: got the list [], expected list of one of"),
    ("  targets: [q_proj, v_proj]", "  targets: [q_proj, lm_head]", "adapter.targets.1: got 'lm_head' (text)"),
    ("  type: dapo", "  type: dpo", "loss.type: got 'dpo' (text), expected one of dapo, grpo,"),
    ("  temperature: 1.0", "  temperature: 0", "rollout.temperature: got 0, expected number > 0; the default is 1.0"),
    ("  top_p: 1.0", "  top_p: 1.5", "rollout.top_p: got 1.5, expected number > 0 and <= 1"),
    ("  top_p: 1.0", "  top_p: 0", "rollout.top_p: got 0, expected number > 0 and <= 1"),
    ("  group_size: 8", "  group_size: 1", "rollout.group_size: got 1, expected whole number >= 2; the default is 8"),
    ("  kl_coef: 0.0", "  kl_coef: -0.1", "loss.kl_coef: got -0.1, expected number >= 0"),
    ("    cap: 2.0", "    cap: 0", "loss.correction.cap: got 0, expected number > 0; the default is 2.0"),
    ("  mismatch_gate: 0.003", "  mismatch_gate: 0", "loss.mismatch_gate: got 0, expected number > 0 or null"),
    ("  warmup_ratio: 0.1", "  warmup_ratio: 10", "optim.warmup_ratio: got 10, expected number >= 0 and < 1"),
    ("  num_stages: 10", "  num_stages: 1", "noise.num_stages: got 1, expected whole number >= 2; the default is 10"),
    ("  steps: 100", "  steps: 1_000", "run.steps: got '1_000' (text), expected whole number >= 1; write 1000"),
    ("  steps: 100", "  steps: 1e2", "run.steps: got 100.0, expected whole number >= 1; write 100"),
]
COMBINATIONS = [
    ("  limit: 100", "  limit: 4", "data.limit 4 with rollout.prompts_per_step 16: there are fewer rows"),
    ("  task: gsm8k", "  task: gsm8", "data.task gsm8: there is no such task; write data.task: gsm8k (tasks: gsm8k,"),
    ("  prompt_template: default", "  prompt_template: 'Solve.'", "it has no {question}, so no prompt would hold"),
    ("  - name: soft_overlong", "  - name: accuracy", "rewards.1.name accuracy: this reward stands twice"),
    (
        "    args: {cache: 256}",
        "    args: {cache: 1024}",
        "rewards.1.args.cache 1024 with rollout.max_new_tokens 1024: the punishment would begin before the first "
        "token; write a cache below 1024, such as 256",
    ),
    (
        "  clip_high: 0.28",
        "  clip_high: 0.1",
        "loss.clip_high 0.1 with loss.clip_low 0.2: the upper bound is the tighter one",
    ),
    ("  delta: null", "  delta: 1.2", "loss.delta 1.2 with loss.clip_high 0.28: it bounds the ratio beyond"),
    ("  level: token", "  level: sequence", "write loss.level: token, or loss.type: grpo for GSPO"),
    (
        "  type: dapo",
        "  type: luspo",
        "loss.type luspo with loss.level token: it is defined on sequences; write loss.level",
    ),
    (
        "    mode: token_truncate",
        "    mode: off",
        "loss.correction.mode off with noise.where rollout: completions of the noisy policy would be taken for the "
        "clean one's; write loss.correction.mode: token_truncate, or noise.where: both",
    ),
    (
        "    floor: null",
        "    floor: 2.0",
        "loss.correction.floor 2.0 with loss.correction.cap 2.0: no ratio lies between",
    ),
    (
        "  top_p: 1.0",
        "  top_p: 0.95",
        "rollout.top_p 0.95 with loss.mismatch_gate 0.003: the trainer's policy has no such",
    ),
    (
        "  sigma_end: 5e-4",
        "  sigma_end: 5e-2",
        "noise.sigma_end 0.05 with noise.sigma_start 0.01: noise falls over the run; write a sigma_end of at most 0.01",
    ),
    (
        "  sigma_end: 5e-4",
        "  sigma_end: 0",
        "an exponential never reaches 0; write noise.sigma_end: 5e-4, or noise.schedule",
    ),
    (
        "  num_stages: 10",
        "  num_stages: 2",
        "noise.num_stages 2 with noise.indexing code: (k-1)/(K-2) needs K of at least 3",
    ),
    (
        "  steps: 100",
        "  steps: 9",
        "run.steps 9 with noise.num_stages 10: some stages would have no step; write run.steps: 10",
    ),
    (
        "  where: rollout",
        "  controller: {target: 0.5}",
        "noise.controller.target 0.5 with noise.controller.metric off: nothing would read the target; write",
    ),
    (
        "  where: rollout",
        "  controller: {metric: entropy}",
        "noise.controller.metric entropy with noise.controller.target null: it has no target; write "
        "noise.controller.target, such as 0.5 (nats a token)",
    ),
    (
        "  where: rollout",
        "  controller: {metric: ess, target: 1.0}",
        "noise.controller.target 1.0: an effective sample size is a share of the tokens",
    ),
    (
        "  enabled: true",
        "  controller: {metric: ess, target: 0.9}\n  enabled: false",
        "noise.controller.metric ess with noise.enabled false: there is no noise to control",
    ),
    (
        "  where: rollout",
        "  controller: {metric: ess, target: 0.9}\n  where: both",
        "sampler and trainer then have the same noise, and the effective sample size is 1 whatever sigma is",
    ),
    (
        "  where: rollout",
        "  controller: {metric: ess, target: 0.9, sigma_max: 5e-3}",
        "noise.controller.sigma_max 0.005 with noise.sigma_start 0.01: sigma begins at sigma_start, which has to lie "
        "between sigma_min and sigma_max; write noise.sigma_start: 0.005, or another noise.controller.sigma_max",
    ),
    (
        "  where: rollout",
        "  controller: {metric: ess, target: 0.9, sigma_min: 0.2}",
        "noise.controller.sigma_min 0.2 with noise.controller.sigma_max 0.1: no sigma lies between them",
    ),
    (
        "  where: rollout",
        "  controller: {metric: kl, target: 0.9}",
        "noise.controller.metric: got 'kl' (text), expected one of off, entropy, ess",
    ),
    (
        "  num_iterations: 1",
        "  num_iterations: 4",
        "loss.num_iterations 4 with run.save_every 50: a checkpoint would fall between two updates on one rollout, and "
        "could not be resumed to the same numbers; write run.save_every: 52",
    ),
]
# Two keys are at odds: what is set beside the recipe above, and what the error has to say
PAIRS = [
    (
        ["noise.where=both", "loss.kl_coef=0.1"],
        "noise.where both with loss.kl_coef 0.1: the reference policy would be noisy too, and the KL divergence would "
        "not be the one from the base; write noise.where: rollout, or loss.kl_coef: 0",
    ),
    (["noise.enabled=false", "noise.where=both"], "noise.where both with noise.enabled false: there is no noise"),
    (
        ["rollout.engine=transformers", "rollout.kernel=marlin"],
        "rollout.kernel marlin with rollout.engine transformers",
    ),
    (["rollout.engine=transformers", "rollout.deterministic=true"], "transformers repeats itself anyway"),
    (["rollout.engine=transformers", "rollout.memory=20"], "rollout.memory 20.0 with rollout.engine transformers"),
    (["rollout.engine=transformers", "memory.cap_gib=24"], "memory.cap_gib 24.0 with rollout.engine transformers"),
    (["rollout.engine=vllm", "rollout.batch_size=8"], "vllm schedules its own batches; write rollout.memory"),
    (["rollout.memory=30", "memory.cap_gib=24"], "(GiB); write a rollout.memory below 24"),
    (["model.format=bf16", "rollout.kernel=humming"], "rollout.kernel humming with model.format bf16"),
    (["model.format=bf16", "rollout.tune_kernels=true"], "rollout.tune_kernels true with model.format bf16"),
    (
        ["rollout.engine=transformers", "rollout.kv_cache_dtype=fp8"],
        "rollout.kv_cache_dtype fp8 with rollout.engine transformers",
    ),
    (
        ["rollout.tune_kernels=true", "rollout.deterministic=true"],
        "rollout.tune_kernels true with rollout.deterministic true",
    ),
    (["model.dtype=float32", "rollout.engine=vllm"], "model.dtype float32 with rollout.engine vllm"),
    (["loss.type=vespo", "loss.level=sequence"], "it takes the sequence's ratio by itself; write loss.level: token"),
    (["loss.type=vespo", "loss.correction.mode=sequence_mask"], "write loss.correction.mode: token_mask"),
    (
        ["loss.type=cispo", "loss.clip_high=5", "loss.delta=2"],
        "loss.delta 2.0 with loss.type cispo: it reads no delta; write loss.delta: null",
    ),
    (
        ["loss.type=cispo"],
        "loss.clip_high 0.28 with loss.type cispo: it is the largest ratio itself, and equal policies have a ratio of "
        "1; write loss.clip_high: 5",
    ),
    (
        ["loss.correction.cap=0.9"],
        "loss.correction.cap 0.9: a ratio of 1, where sampler and trainer agree, would be outside; "
        "write loss.correction.cap: 1 or more",
    ),
    (
        ["data.prompt_template=Q: {question}"],
        "got the mapping {'Q': {'question': None}}, expected text; write text with a colon, brace or bracket in quotes "
        "(after --set in a second pair: --set 'data.prompt_template=\"...\"')",
    ),
    (["loss.correction.floor=1.5"], "loss.correction.floor 1.5: a ratio of 1, where sampler and trainer agree, would"),
    (
        ["rewards=[{name: acuracy}]"],
        "rewards.0.name acuracy: there is no such reward; write rewards.0.name: accuracy (rewards: accuracy, format, "
        "soft_overlong, length; your own: path/to/file.py:function,",
    ),
    (
        ["rewards=[{name: correctness}]"],
        "there is no such reward; write one of accuracy, format, soft_overlong, length",
    ),
    (["rewards=[{name: LENGTH}]"], "there is no such reward; write rewards.0.name: length (rewards: "),
    (["rewards=[{name: 'rewards.py'}]"], "it is a file; write the function in it too, rewards.py:FUNCTION"),
    (["rewards=[{name: 'rewards.py:'}]"], "there is no such reward"),
    (["rewards=[{name: 'localhost:8000/grade'}]"], "it names no function; write http://localhost:8000/grade if a"),
    (["rewards=[{name: 'localhost:8000'}]"], "it names no function; write http://localhost:8000 if a"),
    (["rewards=[{name: 'htp://localhost:8000'}]"], "htp:// is spoken by no reward server; write a URL such as http://"),
    (["rewards=[{name: 'http:///grade'}]"], "it names no host"),
    (["rewards=[{name: 'http://local host/'}]"], "it holds a blank"),
    (["rewards=[{name: 'http://localhost:port/'}]"], "it is no URL (Port could not be cast to integer"),
    (["rewards=[{name: 'http://me:secret@host/'}]"], "a name and password in it would be logged"),
    (["rewards=[{name: accuracy, weight: 0}]"], "no reward has a weight, so nothing would be learned"),
    (["data.columns={problem: question}"], "data.columns.problem question: only our columns can be mapped (question,"),
    (["data.columns={problem: question}"], "; write data.columns: {question: problem}"),
    (["data.columns={frage: q}"], "; write data.columns: {question: THEIR_NAME, answer: THEIR_NAME}"),
    (["rollout.top_k=50"], "rollout.top_k 50 with loss.mismatch_gate 0.003"),
    (
        ["rollout.temperature=0.005"],
        "rollout.temperature 0.005: vllm samples at 0.01 instead, and the trainer's logprobs would be of another "
        "policy; write rollout.temperature: 0.01 or more",
    ),
]


def edited(tmp_path, old, new):
    assert RECIPE.count(old + "\n") == 1
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace(old + "\n", new + "\n"))
    return path


def test_the_recipe_that_is_edited_is_right(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    config = load_recipe(path)
    assert (config.optim.learning_rate, config.noise.sigma_end, config.loss.correction.floor) == (1e-5, 5e-4, None)


@pytest.mark.parametrize(("old", "new", "says"), KEYS + TYPES + COMBINATIONS)
def test_a_wrong_edit_is_named_with_its_line(tmp_path, old, new, says):
    path = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    message = str(error.value)
    assert says in message
    assert "\n" not in message
    line = RECIPE[: RECIPE.index(old + "\n")].count("\n") + 1
    assert message.startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(("overrides", "says"), PAIRS)
def test_keys_at_odds_are_both_named_with_the_override_that_did_it(tmp_path, overrides, says):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    with pytest.raises(ConfigError) as error:
        load_recipe(path, overrides)
    assert says in str(error.value)
    assert str(error.value).startswith("--set ")


@pytest.mark.parametrize("old", ["  base: Qwen/Qwen2.5-7B-Instruct", "  task: gsm8k", "  steps: 100"])
def test_a_missing_required_key_is_named(tmp_path, old):
    path = edited(tmp_path, old, "")
    section = {"  base": "model", "  task": "data", "  steps": "run"}[old.split(":")[0]]
    key = f"{section}.{old.split(':')[0].strip()}"
    with pytest.raises(ConfigError, match=rf"{key}: missing; write {key} \((text|whole number >= 1): "):
        load_recipe(path)


def test_a_missing_section_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {base: tiny}\ndata: {task: arith}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: run: missing; write run: and under it at least steps"):
        load_recipe(path)


def test_the_number_of_further_mistakes_is_told(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace("rank: 32", "rnk: 32").replace("top_p: 1.0", "top_p: 2"))
    with pytest.raises(ConfigError, match=r"rnk: unknown key.*\(1 more after this one\)"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("overrides", "read"),
    [
        (["loss.correction.mode=off", "noise.where=both"], lambda c: c.loss.correction.mode == "off"),
        (["loss.correction.mode=off", "noise.enabled=false"], lambda c: c.noise.where == "rollout"),
        (["loss.type=grpo", "loss.level=sequence"], lambda c: c.loss.level == "sequence"),
        (["loss.type=cispo", "loss.clip_high=5"], lambda c: c.loss.clip_high == 5.0),
        (["loss.correction.floor=1.0", "loss.correction.cap=1.5"], lambda c: c.loss.correction.floor == 1.0),
        (["noise.num_stages=2", "noise.indexing=paper"], lambda c: c.noise.num_stages == 2),
        (["noise.sigma_end=0", "noise.schedule=linear"], lambda c: c.noise.sigma_end == 0),
        (["run.steps=1", "noise.enabled=false"], lambda c: c.run.steps == 1),
        (["rollout.top_p=0.9", "loss.mismatch_gate=null"], lambda c: c.rollout.top_p == 0.9),
        (["rollout.memory=0.8", "memory.cap_gib=0.5"], lambda c: c.rollout.memory == 0.8),
        (["loss.num_iterations=5"], lambda c: c.run.save_every == 50),
        (
            ["noise.controller.metric=entropy", "noise.controller.target=2", "noise.where=both", "run.steps=3"],
            lambda c: c.noise.num_stages == 10,
        ),
        (
            ["noise.controller.metric=ess", "noise.controller.target=0.9", "noise.sigma_end=0"],
            lambda c: c.noise.controller.gain == 0.5,
        ),
        (["loss.delta=2"], lambda c: c.loss.delta == 2.0),
        (["rewards=[{name: 'https://user.example:8443/v1/grade?key=1'}]"], lambda c: len(c.rewards) == 1),
        (["rewards=[{name: 'http://[::1]:8000'}]"], lambda c: len(c.rewards) == 1),
        (
            ["rewards=[{name: 'my/rewards.py:short'}, {name: pkg.mod:f}, {name: pkg.mod.f}]"],
            lambda c: len(c.rewards) == 3,
        ),
        (
            ["rewards=[{name: soft_overlong, args: {cache: 2000, max_length: 3000}}]"],
            lambda c: c.rollout.max_new_tokens == 1024,
        ),
    ],
)
def test_what_is_near_an_impossible_combination_is_accepted(tmp_path, overrides, read):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    assert read(load_recipe(path, overrides))


def test_the_models_themselves_refuse_what_recipes_may_not_hold():
    with pytest.raises(ValidationError, match="there are fewer rows than prompts in a step"):
        RunConfig.model_validate(
            {"model": {"base": "tiny"}, "data": {"task": "arith", "limit": 7}, "run": {"steps": 20}}
        )
    config = load_recipe("tiny")
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 3


def test_the_table_of_keys_has_each_key_with_type_default_and_description():
    rows = {row.key: row for row in describe_config()}
    assert rows["optim.learning_rate"][1:3] == ("number > 0 and < 1", "1e-05")
    assert rows["rollout.memory"][1:3] == ("number > 0 or null", "null")
    assert rows["data.columns"][1] == "mapping or null"
    assert rows["rewards.N.name"][1:3] == ("text", "required")
    assert rows["adapter.targets"].default == "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
    assert rows["noise.enabled"][1:3] == ("true or false", "true")
    assert all(row.description for row in rows.values())
    assert len(rows) == len(describe_config())


@pytest.mark.parametrize("name", recipe_names())
def test_no_recipe_trains_what_the_paper_says_collapses(name):
    config = load_recipe(name)
    if config.model.format == "bf16":
        assert config.optim.learning_rate <= 5e-6
        assert not config.noise.enabled


def test_importing_the_configuration_loads_nothing_heavy():
    heavy = "torch numpy transformers peft trl datasets vllm sympy pandas matplotlib"
    code = (
        "import sys; from qerl.config.recipe import load_recipe, recipe_names; "
        "[load_recipe(n) for n in recipe_names()]; "
        f"print([m for m in '{heavy}'.split() if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
