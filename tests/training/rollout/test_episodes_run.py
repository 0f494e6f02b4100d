"""Runs with an environment: the shipped ones are learned, a run resumes to the same numbers, files say it all."""

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
def learned(tmp_path_factory):
    """Seven steps with the calculator, in which the model learns to use it."""
    folder = tmp_path_factory.mktemp("calculator")
    config = recipe(
        "calculator", folder, "rollout.prompts_per_step=4", "rollout.group_size=6", "run.save_every=5", steps=7
    )
    return config, start(config, "calculator").run_dir


def test_the_embedded_model_learns_to_use_the_calculator(learned):
    rows = read_metrics(learned[1])
    calls = [row["environment/tool_calls"] for row in rows]
    rewards = [row["reward"] for row in rows]
    assert sum(calls[-2:]) / 2 > 1.8 > 1.3 > calls[0]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2
    # Each turn was sampled from what trains, token for token.
    assert max(row["mismatch/max_abs"] for row in rows) < 1e-4
    # Lengths count what the model wrote.
    assert all(row["completions/max_tokens"] < 80 for row in rows)


def test_an_episode_is_logged_turn_by_turn(learned):
    lines = (learned[1] / "completions" / "step-000007.jsonl").read_text().splitlines()
    told = next(row for row in map(json.loads, lines) if len(row["turns"]) > 2)
    roles = [turn["role"] for turn in told["turns"]]
    assert roles[:2] == ["assistant", "tool"]
    assert roles[-1] == "assistant"
    assert told["completion"] == told["turns"][-1]["text"]
    assert told["ended"] == "done"


def test_a_run_with_an_environment_resumes_to_the_same_bits(learned, tmp_path):
    _, whole = learned
    again = tmp_path / "run"
    shutil.copytree(whole, again)
    resume(again, step=5)
    assert numbers(again) == numbers(whole)
    assert same_adapters(again / "adapter", whole / "adapter")


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
