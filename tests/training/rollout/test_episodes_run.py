"""Runs with an environment: a run resumes to the same numbers, files say it all."""

import json
import shutil
from itertools import islice

import pytest

from qerl.config.recipe import load_recipe
from qerl.data.tasks import get_task
from tests.helpers.small_run import numbers, same_adapters
from training.run import resume, start
from training.run_dir.log import read_metrics

SMALL = (
    *("model.format=bf16", "optim.warmup_ratio=0", "optim.schedule=constant", "loss.mismatch_gate=1e-6"),
    *("logging.completions_every=1", "logging.completions_count=64"),
)


def recipe(name, folder, *overrides, steps, out="run"):
    """The shipped recipe on a file of the task's first rows."""
    task = get_task({"calculator": "arith"}.get(name, name))
    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in islice(task.generate("train"), 40)))
    return load_recipe(name, [*SMALL, f"data.source={rows}", *overrides], steps=steps, out=str(folder / out))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Two steps with the calculator."""
    folder = tmp_path_factory.mktemp("calculator")
    settings = ("rollout.prompts_per_step=2", "rollout.group_size=4", "run.save_every=1")
    return start(recipe("calculator", folder, *settings, steps=2), "calculator").run_dir


def test_an_episode_is_logged_turn_by_turn_and_trained_token_for_token(played):
    rows = read_metrics(played)
    assert max(row["environment/tool_calls"] for row in rows) > 0
    assert max(row["mismatch/max_abs"] for row in rows) < 1e-4
    assert all(row["completions/max_tokens"] < 80 for row in rows)  # lengths count what the model wrote
    lines = (played / "completions" / "step-000002.jsonl").read_text().splitlines()
    told = next(row for row in map(json.loads, lines) if len(row["turns"]) > 2)
    roles = [turn["role"] for turn in told["turns"]]
    assert roles[:2] == ["assistant", "tool"]
    assert roles[-1] == "assistant"
    assert told["completion"] == told["turns"][-1]["text"]
    assert told["ended"] == "done"


def test_a_run_with_an_environment_resumes_to_the_same_bits(played, tmp_path):
    again = shutil.copytree(played, tmp_path / "run")
    resume(again, step=1)
    assert numbers(again) == numbers(played)
    assert same_adapters(again / "adapter", played / "adapter")


BROKEN = """
class Broken:
    def reset(self, example):
        raise ConnectionError("the service is down")

    def step(self, action):
        return None, 0.0, True
"""


def test_a_step_all_of_whose_episodes_fail_at_once_changes_nothing_and_ends(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    settings = (f"environment.name={tmp_path / 'broken.py'}:Broken", "rewards=[{name: environment}]")
    settings += ("rollout.prompts_per_step=2", "rollout.group_size=2", "environment.tools=[]")
    run_dir = start(recipe("word_game", tmp_path, *settings, steps=1), "word_game").run_dir
    (row,) = read_metrics(run_dir)
    assert row["environment/failed_share"] == 1.0
    assert row["loss"] == row["grad_norm"] == 0.0
    assert "sampling/entropy" not in row
