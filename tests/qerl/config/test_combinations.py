"""Keys that are valid alone but impossible together: the error has to name both, and the remedy."""

import json

import pytest

from qerl.base.errors import ConfigError
from qerl.config.recipe import load_recipe
from tests.helpers.recipe_text import RECIPE, check_wrong_edit

COMBINATIONS = [
    ("  limit: 100", "  limit: 4", "data.limit 4 with rollout.prompts_per_step 16: there are fewer rows"),
    ("  task: gsm8k", "  task: gsm8",
     "data.task gsm8: there is no such task; write data.task: gsm8k, or one of gsm8k,"),
    ("  prompt_template: default", "  prompt_template: 'Solve.'", "it has no {question}, so no prompt would hold"),
    ("  - name: soft_overlong", "  - name: accuracy", "rewards.1.name accuracy: this reward stands twice"),
    ("  clip_high: 0.28", "  clip_high: 0.1",
     "loss.clip_high 0.1 with loss.clip_low 0.2: the upper bound is the tighter one"),
    ("  delta: null", "  delta: 1.2", "loss.delta 1.2 with loss.clip_high 0.28: it bounds the ratio beyond"),
    ("  level: token", "  level: sequence", "write loss.level: token, or loss.type: grpo for GSPO"),
    ("  type: dapo", "  type: luspo",
     "loss.type luspo with loss.level token: it is defined on sequences; write loss.level"),
    ("    mode: token_truncate", "    mode: off",
     "loss.correction.mode off with noise.where rollout: completions of the noisy policy would be taken for the "
     "clean one's; write loss.correction.mode: token_truncate, or noise.where: both"),
    ("  top_p: 1.0", "  top_p: 0.95",
     "rollout.top_p 0.95 with loss.mismatch_gate 0.003: the trainer's policy has no such"),
    ("  sigma_end: 5e-4", "  sigma_end: 5e-2",
     "noise.sigma_end 0.05 with noise.sigma_start 0.01: noise falls over the run; write a sigma_end of at most 0.01"),
    ("  sigma_end: 5e-4", "  sigma_end: 0",
     "an exponential never reaches 0; write noise.sigma_end: 5e-4, or noise.schedule"),
    ("  num_stages: 10", "  num_stages: 2",
     "noise.num_stages 2 with noise.schedule exponential: (k-1)/(K-2) needs K of at least 3"),
    ("  steps: 100", "  steps: 9",
     "run.steps 9 with noise.num_stages 10: some stages would have no step; write run.steps: 10"),
    ("  num_iterations: 1", "  num_iterations: 4",
     "loss.num_iterations 4 with run.save_every 50: a checkpoint would fall between two updates on one rollout, "
     "and could not be resumed to the same numbers; write run.save_every: 52"),
]  # fmt: skip
# Two keys contradict each other: the overrides of the recipe above, and what the error has to say
PAIRS = [
    (["data.curriculum={hard_share: 0.3}"], "data.curriculum.hard_share: this key is gone; write data.curr"),
    (["noise.where=both", "loss.kl_coef=0.1"],
     "noise.where both with loss.kl_coef 0.1: the reference policy would be noisy too, and the KL divergence would "
     "not be the one from the base; write noise.where: rollout, or loss.kl_coef: 0"),
    (["noise.enabled=false", "noise.where=both"], "noise.where both with noise.enabled false: there is no noise"),
    (["rollout.engine=transformers", "rollout.kernel=marlin"],
     "rollout.kernel marlin with rollout.engine transformers"),
    (["rollout.engine=transformers", "rollout.deterministic=true"], "transformers repeats itself anyway"),
    (["rollout.engine=transformers", "rollout.memory=20"], "rollout.memory 20.0 with rollout.engine transformers"),
    (["rollout.engine=transformers", "memory.cap_gib=24"], "memory.cap_gib 24.0 with rollout.engine transformers"),
    (["rollout.memory=30", "memory.cap_gib=24"], "(GiB); write a rollout.memory below 24"),
    (["model.format=bf16", "rollout.kernel=humming"], "rollout.kernel humming with model.format bf16"),
    (["rollout.engine=transformers", "rollout.kv_cache_dtype=fp8_per_token_head"],
     "rollout.kv_cache_dtype fp8_per_token_head with rollout.engine transformers"),
    (["loss.type=grpo", "loss.level=sequence", "loss.num_iterations=2"],
     "a token's bounds, and a sequence's ratio is a mean over its tokens, which never gets so far; write "
     "loss.clip_low: 0.0003 and loss.clip_high: 0.0004"),
    (["loss.type=vespo", "loss.level=sequence"], "it takes the sequence's ratio by itself; write loss.level: token"),
    (["loss.type=vespo", "loss.correction.mode=sequence_mask"], "write loss.correction.mode: token_mask"),
    (["loss.type=cispo", "loss.clip_high=5", "loss.delta=2"],
     "loss.delta 2.0 with loss.type cispo: it reads no delta; write loss.delta: null"),
    (["loss.type=cispo"],
     "loss.clip_high 0.28 with loss.type cispo: it is the largest ratio itself, and equal policies have a ratio of "
     "1; write loss.clip_high: 5"),
    (["loss.correction.cap=1.0", "loss.correction.floor=1.0"],
     "loss.correction.floor 1.0 with loss.correction.cap 1.0: no ratio lies between them"),
    (["data.prompt_template=Q: {question}"],
     "got the mapping {'Q': {'question': None}}, expected text; write text in quotes (after --set in a second "
     'pair: --set \'data.prompt_template="..."\')'),
    (["rewards=[{name: acuracy}]"],
     "rewards.0.name acuracy: there is no such reward; write rewards.0.name: accuracy, or one of accuracy, format, "
     "soft_overlong, length, judge, environment, or your own: path/to/file.py:function,"),
    (["rewards=[{name: zzz}]"], "there is no such reward; write one of accuracy, format, soft_overlong, length, judge"),
    (["rewards=[{name: 'rewards.py'}]"], "it is a file; write the name in it too, rewards.py:NAME"),
    (["rewards=[{name: 'localhost:8000'}]"], "or the http://... URL of a reward server"),
    (["rewards=[{name: 'htp://localhost:8000'}]"], "htp:// is spoken by no reward server; write a URL such as http://"),
    (["rewards=[{name: 'http:///grade'}]"], "it names no host"),
    (["rewards=[{name: 'http://local host/'}]"], "it holds a blank"),
    (["rewards=[{name: 'http://localhost:port/'}]"], "it is no URL (Port could not be cast to integer"),
    (["rewards=[{name: 'http://me:secret@host/'}]"], "a name and password in it would be logged"),
    (["rewards=[{name: accuracy, weight: 0}]"], "no reward has a weight, so nothing would be learned"),
    (["data.columns={problem: question}"], "data.columns.problem question: only our columns can be mapped (question,"),
    (["data.columns={problem: question}"], "; write data.columns: {question: problem}"),
    (["data.columns={frage: q}"], "; write data.columns: {question: THEIR_NAME, answer: THEIR_NAME}"),
    (["sft={}", "data.grader=mine.py"], "data.grader mine.py with sft given: rows are given in their order, "),
    (["sft={}", "environment.name=calculator"], "write environment: null, or sft: null"),
    (["environment.name=http://host:99999"], "it is no URL (Port out of range"),
    (["environment.name='http://[::1'"], "it is no URL (Invalid IPv6 URL)"),
    (["environment.name=http://"], "it names no host"),
    (["environment.tools=[calculatr]"], "there is no such tool; write environment.tools.0: calculator"),
    (["rewards=[]"], "expected a list of {name, weight, args, timeout_s}; the default is [{name: accuracy}]"),
    (["data.sources=[{name: a, validation: {}}, {name: b, validation: {}}]", "data.held_out=10", "validation.every=5"],
     "data.held_out 10 with data.sources given: every source has a validation of its own; write data.held_out: 0"),
    (["rollout.top_k=50"], "rollout.top_k 50 with loss.mismatch_gate 0.003"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says"), COMBINATIONS)
def test_a_combination_is_named_with_its_line(tmp_path, old, new, says):
    check_wrong_edit(tmp_path, old, new, says)


@pytest.mark.parametrize(("overrides", "says"), PAIRS)
def test_contradicting_keys_are_both_named_with_the_override_that_caused_it(tmp_path, overrides, says):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    with pytest.raises(ConfigError) as error:
        load_recipe(path, overrides)
    assert says in str(error.value)
    assert str(error.value).startswith("--set ")


@pytest.mark.parametrize(
    ("overrides", "read"),
    [
        (["loss.correction.mode=off", "noise.where=both"], lambda c: c.loss.correction.mode == "off"),
        (["loss.correction.mode=off", "noise.enabled=false"], lambda c: c.noise.where == "rollout"),
        (["loss.type=grpo", "loss.level=sequence"], lambda c: c.loss.level == "sequence"),  # nothing is clipped
        (
            [
                *("loss.type=grpo", "loss.level=sequence", "loss.num_iterations=2"),
                *("loss.clip_low=0.0003", "loss.clip_high=0.0004"),
            ],
            lambda c: c.loss.clip_high == 0.0004,
        ),
        (["loss.type=cispo", "loss.clip_high=5"], lambda c: c.loss.clip_high == 5.0),
        (["loss.correction.floor=1.0", "loss.correction.cap=1.5"], lambda c: c.loss.correction.floor == 1.0),
        (["noise.num_stages=2", "noise.schedule=paper"], lambda c: c.noise.num_stages == 2),
        (["noise.sigma_end=0", "noise.schedule=linear"], lambda c: c.noise.sigma_end == 0),
        (["run.steps=1", "noise.enabled=false"], lambda c: c.run.steps == 1),
        (["rollout.top_p=0.9", "loss.mismatch_gate=null"], lambda c: c.rollout.top_p == 0.9),
        (["rollout.memory=0.8", "memory.cap_gib=0.5"], lambda c: c.rollout.memory == 0.8),
        (["loss.num_iterations=5"], lambda c: c.run.save_every == 50),
        (["rewards=[{name: 'https://user.example:8443/v1/grade?key=1'}]"], lambda c: len(c.rewards) == 1),
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
def test_combinations_close_to_impossible_ones_are_accepted(tmp_path, overrides, read):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    assert read(load_recipe(path, overrides))


@pytest.mark.parametrize(
    "override",
    [
        "environment.name=http://me:SECRETKEY12345@host/",
        "environment.name=http://host/?api_key=SECRETKEY12345",
        "environment.name=http://host/x?a=1#token=SECRETKEY12345",
        "environment.name=http://host/x?se=2030&sig=SECRETKEY12345",
        "environment.name=http://host/api?code=SECRETKEY12345",
        "environment.name=http://host/sk-live-SECRETKEY1234567890/x",
        "rewards=[{name: 'http://host/hf_SECRETKEY1234567890'}]",
    ],
)
def test_no_error_repeats_a_key(override):
    with pytest.raises(ConfigError, match="would be logged") as error:
        load_recipe("tiny", [override])
    assert "SECRETKEY" not in str(error.value)


def test_numbers_whose_names_are_like_those_of_keys_are_shown():
    with pytest.raises(ConfigError, match=r"--set rollout\.max_new_tokens=-100000000000"):
        load_recipe("tiny", ["rollout.max_new_tokens=-100000000000"])
    body = "{max_tokens: 512, stop: ['<|end_of_tokens|>']}"
    load_recipe("tiny", [f"rewards=[{{name: judge, args: {{url: 'http://h/v1', model: m, body: {body}}}}}]"])


KEY = "sk-very-secret-0123456789"


@pytest.mark.parametrize(
    ("name", "args", "place"),
    [
        ("http://127.0.0.1:9/grade", {"headers": {"Authorization": f"Bearer {KEY}"}}, "args.headers.Authorization"),
        ("judge", {"model": "m", "headers": {"X-Api-Key": KEY}}, "args.headers.X-Api-Key"),
        ("judge", {"model": "m", "url": f"http://user:{KEY}@127.0.0.1:9/v1"}, "args.url"),
        ("judge", {"model": "m", "body": {"extra": [{"api_key": KEY}]}}, "args.body.extra.0.api_key"),
    ],
)
def test_a_recipe_with_a_key_is_not_loaded_and_the_key_not_shown(name, args, place):
    """A recipe that is loaded can be saved and printed."""
    with pytest.raises(ConfigError) as error:
        load_recipe("tiny", [f"rewards={json.dumps([{'name': name, 'args': args}])}"])
    assert f"rewards.0.{place}" in str(error.value)
    assert KEY not in str(error.value)


def test_an_environment_s_header_may_name_a_variable_and_not_hold_a_key():
    def asked(value):
        return [f"environment={json.dumps({'name': 'http://127.0.0.1:9', 'args': {'headers': {'X-Api-Key': value}}})}"]

    with pytest.raises(ConfigError, match=r"environment\.args\.headers\.X-Api-Key") as error:
        load_recipe("tiny", asked(KEY))
    assert KEY not in str(error.value)
    assert load_recipe("tiny", asked("${ENVIRONMENT_KEY}")).environment is not None
