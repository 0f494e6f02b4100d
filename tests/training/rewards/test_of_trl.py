"""Rewards as TRL 1.16's documentation has them: what they are given, and what None means."""

import json
import math

import pytest
import torch

import qerl
from qerl.base.errors import ConfigError, RewardError
from qerl.base.own_function import EPISODE_COLUMNS
from qerl.base.program import given
from qerl.config.recipe import save_config
from qerl.config.schema import RewardConfig
from qerl.data.tasks import Example, get_task, with_grader
from tests.helpers.built_rewards import build_rewards
from tests.helpers.small_run import small_config
from training.rewards.rewards import fixed_columns
from training.run_dir.log import read_metrics

WORDS = ["Ann", "buys", "cups", "pens", "jars", "nuts", "keys", "maps"]
ROWS = [
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{word}?"}],
        "solution": str(n),
        "kind": ("word", "number")[n % 2],
    }
    for n, word in enumerate(WORDS)
]
SOURCE = """
import numpy
import torch


def written(prompts, completions, completion_ids, solution, trainer_state, log_extra=None, log_metric=None, **kwargs):
    assert all([m["role"] for m in prompt] == ["system", "user"] for prompt in prompts)
    assert all(set(message) == {"role", "content"} for completion in completions for message in completion)
    texts = [completion[0]["content"] for completion in completions]
    log_extra("solution", solution)
    log_extra("odd", [object() for _ in texts])
    log_extra("length", torch.tensor([len(text) for text in texts]))
    log_extra("two", [{"a": numpy.float32(0.5), "b": numpy.arange(2)} for _ in texts])
    log_metric("own/step", trainer_state.global_step)
    log_metric("own/of", trainer_state.max_steps)
    return [len(text) / 100 for text in texts]


def numbers_only(completions, kind, **kwargs):
    return [float(len(c[0]["content"])) if each == "number" else None for c, each in zip(completions, kind)]


async def later(completions, step, **kwargs):
    return [float(step) for _ in completions]
"""


@pytest.fixture(scope="module")
def recipe(nvfp4_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    settings = "noise.enabled=false", "logging.completions_every=1", "logging.completions_count=8"
    save_config(small_config(nvfp4_base, folder, *settings, steps=2), folder / "recipe.yaml")
    return qerl.Recipe.load(folder / "recipe.yaml").set("data.limit=null")


@pytest.mark.parametrize("in_program", [True, False], ids=["function", "file"])
def test_conversational_rewards_train(in_program, recipe, tmp_path):
    names = ["written", "numbers_only", "later"]
    (tmp_path / "of_trl.py").write_text(SOURCE)
    functions: dict = {}
    exec(SOURCE, functions)
    reward = [functions[name] if in_program else f"{tmp_path}/of_trl.py:{name}" for name in names]
    run = qerl.train(recipe, reward=reward, data=ROWS, out=tmp_path / "run")
    rows = run.completions
    assert set(rows["solution"]) <= {row["solution"] for row in ROWS}
    assert rows["odd"].str.startswith("<object").all()
    assert rows["length"].tolist() == rows["completion"].str.len().tolist()
    assert rows["two"].tolist() == [{"a": 0.5, "b": [0, 1]}] * len(rows)
    assert run.metrics["own/step"].tolist() == [0, 1]  # as TRL counts: steps that are done
    assert run.metrics["own/of"].tolist() == [2, 2]
    assert run.metrics["rewards/later"].tolist() == [1, 2]  # as the log counts
    texts = {int(row["solution"]) % 2 for _, row in rows.iterrows() if row["numbers_only"] == row["numbers_only"]}
    assert texts <= {1}


def test_a_completion_without_any_reward_has_no_say(recipe, tmp_path):
    """In each group of 4, two have no reward: the others' advantages are those of a group of two."""

    def half(completions, **kwargs):
        return [None, None, 1.0, 0.0] * (len(completions) // 4)

    run = qerl.train(recipe, reward=half, data=ROWS, out=tmp_path / "run", steps=1)
    (metrics,) = read_metrics(run.path)
    assert metrics["completions/unscored_share"] == 0.5
    assert metrics["reward"] == metrics["rewards/half"] == 0.5
    file = next((run.path / "completions").glob("*.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["advantage"] for row in rows if not row["rewards"]} == {0.0}
    known = 0.5 / (torch.tensor([1.0, 0.0]).std().item() + 1e-4)
    assert {round(row["advantage"], 5) for row in rows if row["rewards"]} == {round(known, 5), round(-known, 5)}


def test_nothing_is_learned_where_no_completion_has_a_reward(recipe, tmp_path):
    def none(completions):
        return [None] * len(completions)

    (metrics,) = read_metrics(qerl.train(recipe, reward=none, data=ROWS, out=tmp_path / "r", steps=1).path)
    assert (metrics["completions/unscored_share"], metrics["reward"], metrics["grad_norm"]) == (1.0, None, 0.0)


@pytest.mark.parametrize(
    ("reward", "rows", "line"),
    [
        (lambda completions: [c.lower() for c in completions], ROWS, 'its text completion[0]["content"]'),
        (lambda completions: [c[0]["content"] for c in completions], [{"prompt": w} for w in WORDS], "is a text"),
        (lambda completions, log_extra: log_extra("a", [1]), ROWS, "gave log_extra('a', ...) 1 values for"),
    ],
)
def test_what_does_not_fit_is_said(reward, rows, line, recipe, tmp_path):
    def told(completions, **columns):
        return reward(completions, *([columns["log_extra"]] if "log_extra" in line else [])) or [0.0] * len(completions)

    with pytest.raises(RewardError) as raised:
        qerl.train(recipe, reward=told, data=rows, out=tmp_path / "run")
    assert line in str(raised.value)


def test_rewards_that_come_with_trl(recipe, tmp_path):
    run = qerl.train(recipe, reward="trl.rewards:accuracy_reward", data=ROWS, out=tmp_path / "run", steps=1)
    assert "rewards/accuracy_reward" in run.metrics


@pytest.mark.parametrize("conversational", [True, False])
def test_an_episode_is_the_messages_after_the_prompt(conversational, tmp_path):
    """One that never began has the empty answer alone; where rows have text, the last turn is the completion."""
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append((prompts, completions))
        return [None, 1.0]

    turns = [{"role": "assistant", "content": "a?"}, {"role": "tool", "content": "b"}]
    examples = [Example("q", "", "1", conversational=conversational)]
    config = RewardConfig(name="python:reward")
    with given({"reward": reward}, {}):
        built = build_rewards([config], fixed_columns(get_task("own"), 8), examples, tmp_path, EPISODE_COLUMNS)
        columns = {"row": [0, 0], "completion_ids": [[1], []], "prompts": ["<q>", "<q>"], "turns": [turns, []]}
        values = built.functions[0](["c", ""], **columns, episode_reward=[0.0, 0.0], tool_calls=[0, 0])
    assert [math.isnan(value) for value in values] == [True, False]
    asked, empty = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": ""}]
    expected = ([asked] * 2, [turns, empty]) if conversational else (["<q>"] * 2, ["c", ""])
    assert seen == [expected]


def test_a_grader_of_episodes_names_their_columns(tmp_path):
    (tmp_path / "grader.py").write_text("def grade(completion, turns, tool_calls): return len(turns) / 4\n")
    task = with_grader(get_task("own"), f"{tmp_path / 'grader.py'}", 60.0)
    given = [RewardConfig(name="accuracy")], fixed_columns(task, 8), [Example("q", "", "1")], tmp_path
    turns = [[{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]]
    columns = {"row": [0], "completion_ids": [[1]], "prompts": ["q"], "turns": turns, "tool_calls": [1]}
    assert build_rewards(*given, EPISODE_COLUMNS).functions[0](["c"], **columns, episode_reward=[0.0]) == [0.5]
    with pytest.raises(ConfigError, match="asks for 'turns', which is neither among its args nor a column"):
        build_rewards(*given)
