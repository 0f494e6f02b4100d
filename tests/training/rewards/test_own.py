"""Reward functions of users that misbehave: each becomes one line, with the completion saved; and async ones."""

import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from qerl.base.errors import ConfigError, DataError, RewardError
from qerl.config.recipe import load_recipe
from qerl.config.schema import RewardConfig
from qerl.data.tasks import Example, get_task, with_grader
from tests.helpers.built_rewards import build_rewards
from tests.helpers.processes import is_gone, until_gone
from training.preflight.checks import check_config
from training.rewards.grading import Grader
from training.rewards.rewards import FAILED, fixed_columns

EXAMPLES = [Example("2+16?", "18", "a"), Example("1+2?", "3", "b")]
FIXED = fixed_columns(get_task("gsm8k"), 100)
IMPORTS = "import asyncio, itertools, os, signal, subprocess, sys, threading, time, random\n"


def own(tmp_path, body, name="reward", timeout_s=60.0, start="def"):
    """The rewards of a recipe whose only one has this body."""
    path = tmp_path / f"{name}.py"
    path.write_text(f"{IMPORTS}{start} {name}(completions, **columns):\n    {body}\n")
    return RewardConfig(name=f"{path}:{name}", timeout_s=timeout_s)


def build(tmp_path, *wanted):
    return build_rewards(wanted, FIXED, EXAMPLES, tmp_path / "run")


def call(function, completions=("good", "", "fine"), row=None):
    ids, row = [[1] * len(text) for text in completions], row or [0] * len(completions)
    return function(list(completions), row, prompts=["p"] * len(row), completion_ids=ids)


@pytest.mark.parametrize(
    ("body", "message", "saved"),
    [
        ("'' in completions and os._exit(0); return [1.0]", r"ended its process \(os\._exit or .* with code 0\)", 1),
        ("'' in completions and os.abort()", "ended its process by the signal SIGABRT", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", "by the signal SIGKILL, as the system does when memory runs out", 0),
        ("'' in completions and sys.exit('bye'); return [1.0]", r"raised SystemExit: bye \(reward\.py, line 3\)", 1),
        ("raise asyncio.CancelledError", r"raised CancelledError \(reward\.py, line 3\)", 0),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt", 0),
        ("raise BaseException('two\\nlines\\x1b[2J')", r"raised BaseException: two lines \[2J \(", 0),
        ("return itertools.repeat(1.0)", "returned more than 3 values for 3 completions", None),
        ("return {1.0, 2.0, 3.0}", "returned a set, which has no order, for 3 completions: return a list", None),
        ("return {c: 1.0 for c in completions}", r"returned \{.* for 3 completions", None),
        ("return {c: 1.0 for c in completions}.keys()", "returned a dict_keys, which has no order", None),
        ("return [asyncio.sleep(0)] * 3", r"returned <coroutine .*>, which is not a finite number", 0),
        ("os.chdir('/'); raise ValueError('x')", "raised ValueError: x", 0),
        ("input()", "raised EOFError", 0),
    ],
)
def test_what_would_end_a_run_is_one_line_and_saved(body, message, saved, tmp_path, monkeypatch):
    """The run directory is a relative path, as the default is."""
    monkeypatch.chdir(tmp_path)
    (function,) = build_rewards([own(tmp_path, body)], FIXED, EXAMPLES, Path("run")).functions
    with pytest.raises(RewardError, match=message) as error:
        call(function)
    assert str(error.value).isprintable()
    rows = json.loads((tmp_path / "run" / FAILED).read_text())["completions"]
    texts = ["good", "", "fine"]
    assert [row["completions"] for row in rows] == (texts if saved is None else [texts[saved]])


@pytest.mark.parametrize(
    ("body", "saved"),
    [
        ("return (time.sleep(600 if not c else 0) or 1.0 for c in completions)", [""]),
        ("return max(itertools.count()) if '' in completions else [1.0]", [""]),
        ("time.sleep(600 if len(completions) > 1 else 0); return [1.0]", ["good", "", "fine"]),
    ],
    ids=["generator", "loop in C", "only all together"],
)
def test_a_reward_that_does_not_return_is_late_with_the_completion_named(body, saved, tmp_path):
    (function,) = build(tmp_path, own(tmp_path, body, timeout_s=1.5)).functions
    with pytest.raises(RewardError, match=r"did not return within 1\.5 s; .*rewards\.N\.timeout_s \(1\.5\)") as error:
        call(function)
    assert "\n" not in str(error.value)
    rows = json.loads((tmp_path / "run" / FAILED).read_text())["completions"]
    assert [row["completions"] for row in rows] == saved


def test_an_import_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.base.own_function.LOAD_S", 0.5)
    wanted = own(tmp_path, "return [1.0]", timeout_s=0.1)
    (tmp_path / "reward.py").write_text("while True: pass\ndef reward(completions): ...\n")
    with pytest.raises(ConfigError, match=r"cannot be imported: did not return within 0\.5 s"):
        build(tmp_path, wanted)


def test_the_time_limit_of_calls_leaves_time_to_import(tmp_path):
    """A process imports Python and libraries before the first call, and again after a call that was late."""
    (tmp_path / "reward.py").write_text("import time; time.sleep(1.6)\ndef reward(completions): return [1.0]\n")
    wanted = RewardConfig(name=f"{tmp_path / 'reward.py'}:reward", timeout_s=1.5)
    (function,) = build(tmp_path, wanted).functions
    assert call(function, ["a"]) == [1.0]


def test_the_working_directory_is_that_of_the_run_in_each_call(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    body = f"assert os.getcwd() == {str(tmp_path)!r}; os.chdir('/'); return [1.0]"
    (function,) = build(tmp_path, own(tmp_path, body)).functions
    assert [call(function, ["a"]), call(function, ["b"])] == [[1.0], [1.0]]
    assert os.getcwd() == str(tmp_path)
    assert "changed the working directory, which is changed back after each call" in caplog.text


def test_threads_and_children_end_with_the_process_of_the_reward_and_it_works_again(tmp_path):
    """A thread that goes on for ever would keep an interpreter from ending; a child would be left over."""
    body = "'' in completions and os._exit(0); threading.Thread(target=time.sleep, args=(600,)).start(); "
    body += "return [float(subprocess.Popen(['sleep', '600']).pid)]"
    (function,) = build(tmp_path, own(tmp_path, body)).functions
    (child,) = call(function, ["a"])
    assert not is_gone(int(child))
    with pytest.raises(RewardError):
        call(function, [""])
    assert until_gone([int(child)])
    assert call(function, ["a"]) != [child]


def test_a_child_that_the_reward_forks_does_not_answer(tmp_path):
    (function,) = build(tmp_path, own(tmp_path, "os.fork(); return [float(len(c)) for c in completions]")).functions
    assert [call(function, ["a"]), call(function, ["bb"]), call(function, ["ccc"])] == [[1.0], [2.0], [3.0]]


def test_what_a_reward_prints_is_logged_without_control_characters(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    body = "print('seen\\x1b[2J', completions[0]); sys.stdout.flush(); return [1.0]"
    (function,) = build(tmp_path, own(tmp_path, body)).functions
    call(function, ["a"])
    deadline = time.monotonic() + 30
    while "seen" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "reward reward: seen [2J a" in caplog.text


def test_random_numbers_follow_from_the_completions(tmp_path):
    """So that a resumed run draws them again; the run's own generators stay as they are."""
    (function,) = build(tmp_path, own(tmp_path, "return [random.random() for _ in completions]")).functions
    first, second, again = call(function), call(function, ["x"] * 3), call(function)
    assert first == again != second


@pytest.mark.parametrize(
    ("start", "body"),
    [
        ("async def", "return await asyncio.gather(*(asyncio.sleep(0, float(len(c))) for c in completions))"),
        ("async def", "await asyncio.sleep(0)\n    for c in completions: yield float(len(c))"),
        ("def", "return asyncio.sleep(0, [float(len(c)) for c in completions])"),
    ],
    ids=["gather", "generator", "returned"],
)
def test_an_async_reward_is_awaited(start, body, tmp_path):
    (function,) = build(tmp_path, own(tmp_path, body, start=start)).functions
    assert [call(function), call(function, ["ab"])] == [[4.0, 0.0, 4.0], [2.0]]


def test_a_reward_may_take_one_completion(tmp_path):
    (tmp_path / "own.py").write_text("async def size(completion, factor=1): return len(completion) * factor\n")
    reward = RewardConfig(name=f"{tmp_path / 'own.py'}:size", args={"factor": 3})
    assert call(build(tmp_path, reward).functions[0], ["a", "xyz"]) == [3, 9]


def test_rewards_that_wait_run_at_once_and_keep_their_order(tmp_path):
    """Each waits until all three have been called."""
    flags = [str(tmp_path / f"flag{i}") for i in range(3)]
    wanted = []
    for i, flag in enumerate(flags):
        body = f"open({flag!r}, 'w').close(); columns['log_metric']('own/n', {i})\n"
        body += f"    while not all(map(os.path.exists, {flags})): await asyncio.sleep(0.01)\n"
        wanted.append(own(tmp_path, f"{body}    return [{i}.0] * len(completions)", f"own{i}", start="async def"))
    rewards = build(tmp_path, *wanted, RewardConfig(name="format"))
    sample = SimpleNamespace(token_ids=[1], truncated=False, episode=None)
    group = SimpleNamespace(samples=[sample, sample], prompt=SimpleNamespace(text="p", row=0, source=0))
    grader = Grader(rewards, lambda ids: ["\\boxed{1}"] * len(ids), mask_truncated=True)
    graded = grader.grade([group], step=1, steps_done=0)
    assert graded.groups[0].rewards_G_F.tolist() == [[0.0, 1.0, 2.0, 1.0]] * 2
    assert graded.logged == {"own/n": [(0, 2), (1, 2), (2, 2)]}  # each with its two completions


def test_a_time_limit_is_for_own_functions_only():
    with pytest.raises(ConfigError, match=r"0\.timeout_s 5.* with rewards\.0\.name accuracy: it ends by itself"):
        load_recipe("tiny", ["rewards=[{name: accuracy, timeout_s: 5}]"])
    with pytest.raises(ConfigError, match=r"a server has its limit among its args; write rewards\.0\.args\.timeout_s"):
        load_recipe("tiny", ["rewards=[{name: 'http://x/grade', timeout_s: 5}]"])
    assert load_recipe("tiny", ["rewards=[{name: 'x.py:f', timeout_s: 5.0}]"]).rewards[0].timeout_s == 5


# --- a grader of one's own, whose failures are those of a reward
ROWS = [Example("a?", "a", "1", {"level": 0.5}), Example("b?", "b", "2", {"level": 1.0})]


def graded_by(tmp_path, body, *names):
    (tmp_path / "grader.py").write_text(f"def grade(completion, answer, level):\n    {body}\n")
    task = with_grader(get_task("own"), str(tmp_path / "grader.py"))
    wanted = [RewardConfig(name=name) for name in names]
    return build_rewards(wanted, fixed_columns(task, 100), ROWS, tmp_path / "run").functions


def test_the_rewards_that_grade_use_the_grader(tmp_path):
    accuracy, length = graded_by(tmp_path, "return level * (answer in completion)", "accuracy", "length")
    assert call(accuracy, ["a", "xa", "b", "x"], [0, 0, 1, 1]) == [0.5, 0.5, 1, 0]
    assert call(length, ["a", "xa", "b", "xx"], [0, 0, 1, 1]) == [0.5, -0.5, 0.5, -0.5]
    assert accuracy.waits
    assert length.waits


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / (completion != 'b')", r"^grader grader.py raised ZeroDivisionError.*\(grader\.py, line 2\)"),
        ("return 1 - 2 * (completion == 'b')", r"^grader grader.py returned -1\.0, and a grade is a number from 0"),
    ],
)
def test_a_grader_that_fails_stops_the_run_with_the_completion_saved(body, message, tmp_path):
    (accuracy,) = graded_by(tmp_path, body, "accuracy")
    with pytest.raises(RewardError, match=message):
        call(accuracy, ["a", "b"], [0, 1])
    rows = json.loads((tmp_path / "run" / FAILED).read_text())["completions"]
    assert [row["completions"] for row in rows] == ["b"]


def test_a_run_without_answers_or_without_its_grader_is_refused_before_anything_is_loaded(tmp_path):
    task = get_task("own")
    with pytest.raises(DataError, match="2 of 2 rows have no answer"):
        build_rewards([RewardConfig(name="accuracy")], fixed_columns(task, 9), [Example("a", "", "1")] * 2, tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    given = {"task": "own", "data": str(tmp_path / "rows.jsonl")}
    with pytest.raises(ConfigError, match=r"grader file 'no\.py' does not exist here"):
        check_config(load_recipe("tiny", **given, grader="no.py"))
    with pytest.raises(DataError, match=r"task own has no such rows of its own: pass yours with --data FILE"):
        check_config(load_recipe("tiny", task="own"))
