"""Rewards: values by hand, functions of users, and the checks around all of them."""

import json
import os
import time

import pytest

from qerl.base.errors import ConfigError, RewardError
from qerl.config.data import REWARD_NAMES
from qerl.config.schema import RewardConfig
from qerl.data.grading.grade import grade
from qerl.data.tasks import Example, get_task
from qerl.report.metrics import is_own
from tests.helpers.built_rewards import build_rewards
from training.rewards.rewards import (
    FAILED,
    JUDGE,
    REWARDS,
    accuracy,
    check_rewards,
    find_reward,
    fixed_columns,
    format,
    length,
    soft_overlong,
)

EXAMPLES = [Example("2+16?", "18", "a", {"level": 3}), Example("1+2?", "3", "b")]
GSM8K = get_task("gsm8k")


def wanted(*rewards):
    """The rewards of a recipe."""
    return [RewardConfig(**reward) for reward in rewards]


def call(function, completions, row=None, ids=None, **columns):
    """Call a reward as grading does."""
    return function(
        prompts=["p"] * len(completions),
        completions=completions,
        completion_ids=ids or [[1]] * len(completions),
        row=row or [0] * len(completions),
        step=7,
        log_metric=lambda name, value: None,
        **columns,
    )


def build(tmp_path, *rewards, max_new_tokens=100):
    return build_rewards(wanted(*rewards), fixed_columns(GSM8K, max_new_tokens), EXAMPLES, tmp_path)


def write_reward(path, body):
    path.write_text(body, encoding="utf-8")
    return f"{path}:reward"


def test_accuracy_is_the_grade_of_evaluation():
    texts = ["\\boxed{18}", "\\boxed{19}", "#### 18", "18", "\\boxed{18"]
    logged = {}
    rewards = accuracy(texts, ["18"] * 5, GSM8K, log_metric=logged.__setitem__)
    assert rewards == [1.0, 0.0, 1.0, 0.0, 0.0] == [float(grade(GSM8K, text, "18").correct) for text in texts]
    assert logged == {"grades/no_answer_share": 2 / 5, "grades/refused_share": 0.0}


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("boxed", "so \\boxed{18}", 1),
        ("boxed", "\\boxed{17} or \\boxed{18}", 0),
        ("boxed", "\\boxed{}", 0),
        ("boxed", "18", 0),
        ("tags", "<think>9*2</think> <answer>18</answer>", 1),
        ("tags", "9*2</think>\n<answer>18</answer>\n", 1),
        ("tags", "<think>9*2</think> so <answer>18</answer>", 0),
        ("tags", "<think></think><answer>18</answer>", 0),
        ("tags", "<think>a</think><answer> </answer>", 0),
        ("tags", "<think>a</think><answer>18</answer><answer>19</answer>", 0),
        ("tags", "<answer>18</answer><think>a</think>", 0),
        ("think", "<think>a</think>18", 1),
        ("think", "a</think>18", 1),
        ("think", "<think>a</think>", 0),
        ("think", "<think>a</think>b</think>c", 0),
        ("think", "<think>a", 0),
    ],
)
def test_format_by_style(style, text, expected):
    assert format([text], style=style) == [float(expected)]


@pytest.mark.parametrize("style", ["boxed", "tags", "think"])
@pytest.mark.parametrize("text", ["\n", "<think>", "</think> ", "<answer>", "\\boxed ", "\\boxed{ ", "١"])
def test_format_reads_a_hostile_completion_within_a_second(style, text):
    started = time.process_time()
    assert format([text * (1_900_000 // len(text))], style=style) == [0.0]
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    # arXiv 2503.14476, eq. 13 with L_max 100 and L_cache 20
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (500, -1.0)],
)
def test_soft_overlong_follows_equation_13(tokens, expected):
    assert soft_overlong([[0] * tokens], max_new_tokens=100) == pytest.approx([expected])
    assert soft_overlong([[0] * tokens], max_new_tokens=400, max_length=100, cache=20) == pytest.approx([expected])


def test_length_prefers_the_short_completions_of_a_group():
    """Lengths 10, 20, 30 in the first group give lambda 0.5, 0, -0.5; the wrong one of 10 tokens gets min(0, 0.5)."""
    texts = ["#### 18", "#### 18", "#### 18", "#### 3", "#### 4"]
    ids = [[0] * 10, [0] * 20, [0] * 30, [0] * 5, [0] * 5]
    rows, answers = [0, 0, 0, 1, 1], ["18", "18", "18", "3", "3"]
    assert length(texts, ids, answers, rows, GSM8K) == [0.5, 0.0, -0.5, 0.0, 0.0]
    texts[0] = texts[2] = "#### 17"
    assert length(texts, ids, answers, rows, GSM8K) == [0.0, 0.0, -0.5, 0.0, 0.0]


def test_a_recipe_with_several_rewards(tmp_path):
    overlong = {"name": "soft_overlong", "weight": 0, "args": {"cache": 50}}
    boxed = {"name": "format", "weight": 0.2, "args": {"style": "boxed"}}
    rewards = build(tmp_path, {"name": "accuracy"}, boxed, overlong)
    assert [function.__name__ for function in rewards.functions] == ["accuracy", "format", "soft_overlong"]
    assert rewards.weights == [1.0, 0.2, 0.0]
    texts, ids = ["\\boxed{18}", "#### 3"], [[0] * 75, [0] * 10]
    values = [call(function, texts, [0, 1], ids) for function in rewards.functions]
    assert values == [[1.0, 1.0], [1.0, 0.0], [-0.5, 0.0]]


def test_a_function_of_the_user_gets_the_columns_it_names(tmp_path):
    """Its log is left out in a dry run, which has none."""
    body = (
        "def reward(completions, level, answer, question, row, step, log_metric, bonus=0):\n"
        "    assert question == ['2+16?', '1+2?'] and row == [0, 1]\n"
        "    log_metric('count', len(completions))\n"
        "    return [step + bonus + (n or 0) + float(a in c) for c, n, a in zip(completions, level, answer)]\n"
    )
    reward = {"name": write_reward(tmp_path / "mine.py", body), "args": {"bonus": 10}}
    (function,), logged = build(tmp_path, reward).functions, {}
    assert function.__name__ == "reward"
    columns = {"prompts": ["p", "p"], "completion_ids": [[1], [1]], "row": [0, 1], "step": 7}
    values = function(["18", "x"], **columns)
    assert values == [7 + 10 + 3 + 1, 7 + 10 + 0 + 0] == function(["18", "x"], **columns, log_metric=logged.__setitem__)
    assert logged == {"count": 2}


def test_a_function_with_keywords_gets_all_columns(tmp_path):
    name = write_reward(
        tmp_path / "mine.py",
        "def reward(completions, **columns):\n"
        "    assert columns['task'].name == 'gsm8k' and columns['max_new_tokens'] == 100 and columns['k'] == 2\n"
        "    assert set(columns) >= {'prompts', 'completion_ids', 'question', 'answer', 'row', 'level', 'step'}\n"
        "    import numpy\n"
        "    return numpy.array([len(text) for text in completions])\n",
    )
    assert call(build(tmp_path, {"name": name, "args": {"k": 2}}).functions[0], ["ab", "c"]) == [2.0, 1.0]


@pytest.mark.parametrize("name", ["reward", "rewards/mine", "time/mine_s", "vespo/phi_seq_mean", "epoch"])
def test_a_name_that_the_run_logs_itself_is_refused(name, tmp_path):
    body = f"def reward(completions, log_metric):\n    log_metric({name!r}, 1)\n    return [1.0]\n"
    function = build(tmp_path, {"name": write_reward(tmp_path / "mine.py", body)}).functions[0]
    with pytest.raises(RewardError, match=rf"log_metric\('{name}'.* such as 'own/{name}'\. .* are step, .*time/"):
        call(function, ["a"])
    assert not any(map(is_own, ("words", "own/reward", "times", "time", "grades/no_answer_share")))


def test_two_functions_of_one_name_have_different_metrics(tmp_path):
    names = [write_reward(tmp_path / f"{n}.py", f"def reward(completions):\n    return [{n}.0]\n") for n in (1, 2)]
    (tmp_path / "own.py").write_text("def accuracy(completions):\n    return [0.5] * len(completions)\n")
    own = f"{tmp_path / 'own.py'}:accuracy"
    rewards = build(tmp_path, *({"name": name} for name in (*names, own, "accuracy")))
    assert rewards.names == ["reward", names[1], own, "accuracy"]
    assert [call(function, ["x"]) for function in rewards.functions] == [[1.0], [2.0], [0.5], [0.0]]


@pytest.mark.parametrize("name", ["training.rewards.rewards:accuracy", "training.rewards.rewards.accuracy"])
def test_functions_are_found_by_dotted_paths(name, tmp_path):
    (function,) = build(tmp_path, {"name": name}).functions
    assert call(function, ["#### 18", "#### 3"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"name": "acuracy"}, "no reward 'acuracy': write one of accuracy"),
        ({"name": "code"}, "there is no reward 'code': write one of accuracy"),
        ({"name": "no_such.module:f"}, "module 'no_such.module' cannot be imported"),
        ({"name": "no/such/file.py:f"}, "does not exist here"),
        ({"name": "training.rewards.rewards:acuracy"}, r"has no function 'acuracy'; did you mean 'accuracy'\?"),
        ({"name": "format", "args": {"styl": "boxed"}}, r"'styl'; did you mean 'style'\? \(its arguments: style\)"),
        ({"name": "format", "args": {"style": "xml"}}, "no style 'xml': write one of boxed, tags, think"),
        ({"name": "soft_overlong", "args": {"cache": 100}}, "cache 100, which has to lie between 0 and 100"),
        ({"name": "soft_overlong", "args": {"cache": "many"}}, r"cannot be called with args \{'cache': 'many'\}"),
        ({"name": "format", "args": {"completions": []}}, "takes no argument 'completions'"),
    ],
)
def test_impossible_rewards_are_refused_before_the_run(reward, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, reward)


def test_the_names_allowed_in_a_recipe_are_those_of_the_rewards():
    """qerl has its own list of the names, since it imports no code of training."""
    assert {*REWARDS, JUDGE} == set(REWARD_NAMES)


def test_a_file_is_executed_once_and_again_when_it_changes(tmp_path):
    """A file may load a model, and its dataclasses look up their module."""
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom pathlib import Path\n"
        "@dataclass\nclass Seen:\n    count: int = 0\n"
        "with Path(__file__).with_suffix('.log').open('a') as log:\n    log.write('x')\n"
        "def reward(completions):\n    return [1.0] * len(completions)\n"
    )
    name = write_reward(tmp_path / "mine.py", source)
    check_rewards(wanted({"name": name}), fixed_columns(GSM8K, 100))
    build(tmp_path, {"name": name})
    assert (tmp_path / "mine.log").read_text() == "x"
    write_reward(tmp_path / "mine.py", source.replace("[1.0]", "[2.0]"))
    os.utime(tmp_path / "mine.py", (1, 1))
    assert call(build(tmp_path, {"name": name}).functions[0], ["a"]) == [2.0]


def test_an_unusable_file_is_refused_before_the_run(tmp_path):
    for body, message in {
        "def reward(": "cannot be imported: SyntaxError",
        "import no_such_module": "cannot be imported: ModuleNotFoundError",
        "reward = 1": r"has no function 'reward'; give one that is there",
        "import os; os._exit(3)": r"cannot be imported: ended its process \(os\._exit or the like, with code 3\)",
        "def rewards(completions): ...": r"no function 'reward'; did you mean 'rewards'\?",
        "def reward(completions, nonsense): ...": "asks for 'nonsense', which is neither .* a column",
    }.items():
        with pytest.raises(ConfigError, match=message):
            build(tmp_path, {"name": write_reward(tmp_path / "mine.py", body)})
    with pytest.raises(ConfigError, match=rf"does not exist here .*did you mean {tmp_path}/mine\.py\?"):
        find_reward(f"{tmp_path}/mime.py:reward")


def test_changes_a_reward_makes_to_its_lists_do_not_reach_others(tmp_path):
    body = "def reward(completions, completion_ids, row):\n"
    body += "    completions.sort(); row.clear(); completion_ids[0].append(9)\n    return [0.5] * 3\n"
    (function,) = build(tmp_path, {"name": write_reward(tmp_path / "mine.py", body)}).functions
    completions, row, ids = ["c", "b", "a"], [0, 0, 1], [[1], [2], [3]]
    assert call(function, completions, row, ids) == [0.5] * 3
    assert (completions, row, ids) == (["c", "b", "a"], [0, 0, 1], [[1], [2], [3]])


ALL = ["good", "", "fine"]


@pytest.mark.parametrize(
    ("body", "message", "saved"),
    [
        ("return [1 / len(c) for c in completions]", r"raised ZeroDivisionError: .* \(mine\.py, line 2\);", [""]),
        ("return (1 / len(c) for c in completions)", "raised ZeroDivisionError", [""]),
        ("return [float('nan') if not c else 1.0 for c in completions]", "returned nan", [""]),
        ("return ['1' for c in completions]", "returned '1'", ["good"]),
        ("return [10**400 if not c else 1.0 for c in completions]", r"returned 10+\.\.\.0+, which is not", [""]),
        ("return [1e30 if not c else 1.0 for c in completions]", r"returned 1e\+30, which is not a finite", [""]),
        (r"raise ValueError('half \ud800')", "raised ValueError: half", ["good"]),
        ("columns['log_metric']('length', 'long')", "raised ValueError: could not convert", ["good"]),
        ("completions.clear(); columns['row'].clear()", "returned None for 3", ALL),
        ("return [1.0]", "returned 1 values for 3 completions", ALL),
        ("return 1.0", "returned 1.0 for 3 completions", ALL),
        ("return 'abc'", "returned", ALL),
        ("assert len(completions) == 1; return [1.0]", "raised AssertionError", ALL),
    ],
)
def test_a_reward_that_fails_stops_the_run_and_saves_the_completion(body, message, saved, tmp_path):
    name = write_reward(tmp_path / "mine.py", f"def reward(completions, **columns):\n    {body}\n")
    function = build(tmp_path / "run", {"name": name}).functions[0]
    with pytest.raises(RewardError, match=message):
        call(function, ALL, [0, 0, 1])
    report = json.loads((tmp_path / "run" / FAILED).read_text(encoding="utf-8"))
    assert [row["completions"] for row in report["completions"]] == saved
    assert (report["step"], report["reward"]) == (7, "reward")
    assert {"question", "answer", "prompts"} <= set(report["completions"][0])
