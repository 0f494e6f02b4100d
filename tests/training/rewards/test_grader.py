"""A grader of one's own in training: the rewards that grade use it, and its failures are those of a reward."""

import json

import pytest

from qerl.base.errors import ConfigError, DataError, RewardError
from qerl.config.recipe import load_recipe
from qerl.config.schema import RewardConfig
from qerl.data.tasks import Example, get_task, with_grader
from tests.helpers.small_run import small_config
from training.preflight.checks import check_config
from training.rewards.rewards import FAILED, build_rewards, fixed_columns
from training.run import resume, start

EXAMPLES = [Example("a?", "a", "1", {"level": 0.5}), Example("b?", "b", "2", {"level": 1.0})]


def build(tmp_path, body, *names, timeout_s=60.0):
    (tmp_path / "grader.py").write_text(f"import time\ndef grade(completion, answer, level):\n    {body}\n")
    task = with_grader(get_task("own"), str(tmp_path / "grader.py"))
    wanted = [RewardConfig(name=name, timeout_s=timeout_s) for name in names or ("accuracy",)]
    return build_rewards(wanted, fixed_columns(task, 100), EXAMPLES, tmp_path / "run").functions


def call(function, completions, row):
    ids = [[1] * len(text) for text in completions]
    return function(completions, row, prompts=["p"] * len(row), completion_ids=ids)


def test_the_rewards_that_grade_use_the_grader(tmp_path):
    accuracy, length = build(tmp_path, "return level * (answer in completion)", "accuracy", "length")
    assert call(accuracy, ["a", "xa", "b", "x"], [0, 0, 1, 1]) == [0.5, 0.5, 1, 0]
    assert call(length, ["a", "xa", "b", "xx"], [0, 0, 1, 1]) == [0.5, -0.5, 0.5, -0.5]
    assert accuracy.waits
    assert length.waits


@pytest.mark.parametrize(
    ("body", "message", "timeout_s"),
    [
        ("return 1 / (completion != 'b')", r"^grader grader.py raised ZeroDivisionError.*\(grader\.py, line 3\)", 60),
        (
            "return -1 if completion == 'b' else 1",
            r"^grader grader.py returned -1\.0, and a grade is a number from",
            60,
        ),
        ("time.sleep(30 * (completion == 'b')); return 1", r"did not return .* within rewards\.N\.timeout_s \(1\)", 1),
    ],
)
def test_a_grader_that_fails_stops_the_run_with_the_completion_saved(body, message, timeout_s, tmp_path):
    (accuracy,) = build(tmp_path, body, timeout_s=timeout_s)
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


def test_a_resumed_run_notices_another_grader(nvfp4_base, tmp_path, one_thread):
    (tmp_path / "grader.py").write_text("def grade(completion): return sum(map(str.isdigit, completion)) / 99\n")
    own = (f"data.grader={tmp_path / 'grader.py'}", "data.task=own", "rewards=[{name: accuracy}]")
    config = small_config(nvfp4_base, tmp_path, *own, "noise.enabled=false", steps=1)
    run = start(config, "tiny").run_dir
    (tmp_path / "grader.py").write_text("def grade(completion): return 0.5\n")
    with pytest.raises(ConfigError, match=r"the grader's source grader\.py changed"):
        resume(run, steps=2)
