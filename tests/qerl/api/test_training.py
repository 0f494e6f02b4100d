"""`qerl.train`: the numbers of a run by the command, and a process that is left as it was."""

import json
import logging
import os
import random
import signal
import sys

import pytest
import torch

import qerl
from qerl.base.program import ROWS
from qerl.config.recipe import save_config
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.run import start

pytestmark = pytest.mark.usefixtures("one_thread")


def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


@pytest.fixture(scope="module")
def by_command(nvfp4_base, tmp_path_factory):
    """A finished run of 3 steps, and the recipe and the rows for another one."""
    folder = tmp_path_factory.mktemp("command")
    config = small_config(nvfp4_base, folder, steps=3)
    save_config(config, folder / "recipe.yaml")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return start(config, "tiny").run_dir, qerl.Recipe.load(folder / "recipe.yaml"), rows


def state():
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    levels = [logging.getLogger(name).level for name in ("", "transformers", "trl", "datasets")]
    settings = torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    streams = sys.stdout, sys.stderr
    drawn = random.getstate(), torch.get_rng_state().tolist()
    return dict(os.environ), handlers, levels, logging.getLogger().handlers[:], settings, streams, drawn


def test_a_run_of_functions_and_rows_is_that_of_the_command(by_command, tmp_path):
    """It is interrupted in its second step, and resumed in the same process."""
    expected, recipe, rows = by_command
    interrupted = []

    def reward(completions, step):
        if step == 2 and not interrupted:
            interrupted.append(os.kill(os.getpid(), signal.SIGINT))
        return digits(completions)

    before = state()
    run = qerl.train(recipe, reward=reward, data=rows, out=tmp_path / "run")
    assert (run.steps, run.finished, interrupted) == (2, False, [None])
    assert state() == before
    run = qerl.train(resume=run, reward=reward)
    assert state() == before
    assert (run.steps, run.finished, run.warnings) == (3, True, [])

    def shared(row):
        return {key.replace("rewards/reward", "rewards/digits"): value for key, value in row.items()}

    assert [shared(row) for row in numbers(run.path)] == numbers(expected)
    assert same_adapters(run.adapter, expected / "adapter")
    assert [json.loads(line) for line in (run.path / ROWS).read_text().splitlines()] == rows
    assert list(run.metrics.index) == [1, 2, 3]
    assert {"step", "prompt", "completion", "advantage", "reward"} <= set(run.completions.columns)
    assert [axis.get_title() for axis in run.plot("reward", "loss").axes][:2] == ["reward", "loss"]
    assert "3 steps, reward" in repr(run)
    with pytest.raises(qerl.QerlError, match="no metric 'rewad'; it has"):
        run.plot("rewad")
    both = qerl.plot([run, expected], ["reward", "entropy"], "loss")
    assert [axis.get_title() for axis in both.axes][:3] == ["reward", "entropy", "loss"]
    assert len(both.legends[0].get_texts()) == 2
    with pytest.raises(qerl.QerlError, match="there is no run to plot"):
        qerl.plot([])


def test_a_reward_that_raises_ends_the_run_and_closes_its_engine(by_command, tmp_path, monkeypatch):
    _, recipe, _ = by_command
    closed = []
    monkeypatch.setattr("qerl.engine.transformers.engine.TransformersEngine.close", lambda self: closed.append(self))
    before = state()
    with pytest.raises(qerl.QerlError, match="reward broken raised KeyError: 'x'") as raised:
        qerl.train(recipe, reward={"name": broken, "weight": 2.0}, out=tmp_path / "run")
    assert isinstance(raised.value.__cause__.__cause__, KeyError)
    assert (len(closed), state()) == (1, before)


ROWS_8 = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)]


def broken(completions):
    return {}["x"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({}, "None is no recipe: give the name of one"),
        ({"recipe": "tiny", "step": 3}, "qerl.train takes no argument 'step'; did you mean steps?"),
        ({"recipe": "tiny", "reward": lambda x: [1], "data": ROWS_8}, "asks for 'x', which is neither among its"),
        ({"recipe": "tiny", "steps": 0}, "set run.steps"),
        ({"recipe": "tiny", "accept_changes": True}, "leave it out, or give resume=RUN"),
        ({"resume": "nowhere", "data": [{}]}, "resume continues a run as it was configured, and data would change"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(arguments, line, tmp_path, monkeypatch, nvfp4_base):
    monkeypatch.chdir(tmp_path)
    if "recipe" in arguments:
        arguments = {"model": nvfp4_base} | arguments
    with pytest.raises(qerl.QerlError) as refused:
        qerl.train(**arguments)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({}, "None is no recipe: give the name of one"),
        ({"recipe": "tiny", "techer": "x"}, "qerl.distill takes no argument 'techer'; did you mean teacher?"),
        ({"resume": "runs/x", "teacher": "y"}, "teacher would change that: leave it out"),
        ({"recipe": "sft_tiny"}, "distill given with sft given"),
        ({"recipe": "tiny", "teacher": 3}, "3 is no model"),
    ],
)
def test_a_mistake_in_distilling_is_one_line(arguments, line):
    with pytest.raises(qerl.QerlError) as refused:
        qerl.distill(**arguments)
    assert line in str(refused.value)


def test_a_distillation_is_that_of_the_command(nvfp4_base, tmp_path, monkeypatch):
    """The recipe is that of `qerl distill`, and the run is begun as any other."""
    from qerl.cli.train import DistillOptions, config_of

    begun = []
    monkeypatch.setattr("qerl.api.training.begin", lambda config, *rest: begun.append(config) or (None, True))
    monkeypatch.setattr("qerl.api.training.run_of_result", lambda result: begun[-1])
    out = tmp_path / "run"
    given = {"model": str(nvfp4_base), "steps": 8, "out": out}
    assert qerl.distill("tiny", teacher="tiny", **given) == config_of(DistillOptions(teacher="tiny", **given), "tiny")
    assert begun[0].distill.teacher == "tiny"
