"""`qerl train --resume RUN --steps N`: a run with another number of steps follows the schedules of that number."""

import json
import math
import shutil

import pytest

import training.run_dir.resume
import training.trainer
from qerl.base.errors import ConfigError
from qerl.config.recipe import load_config, save_config
from qerl.report.page import render_page
from qerl.report.read import read_run
from tests.helpers.killed import killed_in
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.preflight.checks import check_resumed
from training.run import resume, start
from training.run_dir.checkpoint import checkpoints
from training.run_dir.resume import prolong_

PLAIN = ("optim.schedule=constant", "noise.enabled=false")  # so that nothing depends on the number of steps


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prolonged")


@pytest.fixture(scope="module")
def short(nvfp4_base, folder):
    """A finished run of 3 steps, with a cosine to 0 and three noise stages of one step each."""
    return start(small_config(nvfp4_base, folder, steps=3, out="short"), "tiny").run_dir


@pytest.fixture(scope="module")
def prolonged(short, folder):
    run_dir = shutil.copytree(short, folder / "prolonged")
    resume(run_dir, steps=6)
    return run_dir


def test_without_schedules_a_prolonged_run_equals_a_longer_one(nvfp4_base, tmp_path):
    whole = start(small_config(nvfp4_base, tmp_path, *PLAIN, steps=3, out="whole"), "tiny")
    cut = start(small_config(nvfp4_base, tmp_path, *PLAIN, steps=2, out="cut"), "tiny")
    result = resume(cut.run_dir, steps=3)
    assert result.steps == 3
    assert numbers(result.run_dir) == numbers(whole.run_dir)
    assert same_adapters(result.adapter, whole.adapter)


def test_learning_rate_and_noise_follow_the_new_total_from_the_next_step_on(prolonged, short, whole_run):
    assert numbers(prolonged)[:3] == numbers(short)
    keys = ("step", "learning_rate", "noise/sigma", "noise/stage")
    after, oracle = ([[row[key] for key in keys] for row in numbers(run)[3:]] for run in (prolonged, whole_run))
    assert after == oracle
    assert [row[0] for row in after] == [4, 5, 6]


def test_the_first_result_is_kept_aside_and_run_json_has_the_change(prolonged, short):
    (aside,) = prolonged.glob("replaced-*")
    assert same_adapters(aside / "adapter", short / "adapter")
    assert same_adapters(prolonged / "adapter", checkpoints(prolonged)[-1])
    assert not same_adapters(prolonged / "adapter", short / "adapter")
    assert load_config(prolonged / "config.yaml") == load_config(short / "config.yaml", steps=6)
    about, before = (json.loads((run / "run.json").read_text()) for run in (prolonged, short))
    (change,) = about.pop("totals")
    assert (change["after"], change["was"], change["is"]) == (3, 3, 6)
    assert about == before


def totals(run_dir):
    changes = json.loads((run_dir / "run.json").read_text())["totals"]
    return [(each["after"], each["was"], each["is"]) for each in changes]


def test_the_recorded_changes_are_those_of_the_steps_that_are_kept(short, tmp_path):
    run_dir = shutil.copytree(short, tmp_path / "run")
    for steps, done, expected in [
        (6, 3, [(3, 3, 6)]),
        (6, 2, [(2, 3, 6)]),  # continued earlier: from step 3 on with the schedules of 6
        (5, 4, [(2, 3, 6), (4, 6, 5)]),
        (5, 5, [(2, 3, 6), (4, 6, 5)]),
        (7, 2, [(2, 3, 7)]),
        (3, 2, []),  # unchanged
        (6, 2, [(2, 3, 6)]),
        (6, 0, []),  # from the beginning
    ]:
        prolong_(run_dir, load_config(run_dir / "config.yaml", steps=steps), done)
        assert totals(run_dir) == expected
        assert load_config(run_dir / "config.yaml").run.steps == steps


@pytest.mark.parametrize("place", ["replace_text", "save_config"])  # the result is set aside; and the change recorded
def test_a_run_killed_while_it_is_prolonged_can_go_on(prolonged, short, tmp_path, place):
    run_dir = shutil.copytree(short, tmp_path / "run")
    with killed_in(training.run_dir.resume, place):
        resume(run_dir, steps=6)
    assert not (run_dir / "adapter").exists()
    assert load_config(run_dir / "config.yaml").run.steps == 3
    untouched = shutil.copytree(run_dir, tmp_path / "untouched")
    assert same_adapters(resume(untouched).adapter, short / "adapter")  # it stays finished
    result = resume(run_dir, steps=6)
    assert totals(run_dir) == [(3, 3, 6)]
    assert numbers(result.run_dir) == numbers(prolonged)
    assert same_adapters(result.adapter, prolonged / "adapter")


def test_a_run_can_be_made_shorter_and_the_jump_of_its_schedules_is_logged(whole_run, tmp_path, caplog):
    caplog.set_level("INFO")
    run_dir = shutil.copytree(whole_run, tmp_path / "run")
    assert resume(run_dir, step=4, steps=5).steps == 5
    assert [row["step"] for row in numbers(run_dir)] == [1, 2, 3, 4, 5]
    assert "5 steps instead of 6" in caplog.text
    config = load_config(run_dir / "config.yaml")
    rates = [config.optim.learning_rate * (1 + math.cos(math.pi * 4 / steps)) / 2 for steps in (5, 6)]
    assert "learning rate of the next step: {:.3g} (as it was: {:.3g})".format(*rates) in caplog.text


@pytest.mark.parametrize("steps", [3, 0])
def test_a_total_below_the_steps_done_is_refused_before_anything_changes(short, steps):
    before = {path: path.stat().st_mtime_ns for path in short.rglob("*")}
    said = f"has 3 steps behind it, and --steps {steps} is the number in all: write --steps 4 or more"
    with pytest.raises(ConfigError, match=said):
        resume(short, None, steps)
    assert {path: path.stat().st_mtime_ns for path in short.rglob("*")} == before


def test_a_run_that_ended_between_two_updates_of_a_rollout_is_not_prolonged_from_there(short, tmp_path):
    """The rollout itself is not saved."""
    run_dir = shutil.copytree(short, tmp_path / "run")
    config = load_config(run_dir / "config.yaml")
    loss = config.loss.model_copy(update={"num_iterations": 2})
    save_config(config.model_copy(update={"loss": loss}), run_dir / "config.yaml")
    with pytest.raises(ConfigError, match=r"ended between two updates .*--resume 2 --steps 6"):
        check_resumed(run_dir, None, 6)


def test_the_command_works_as_typed(short, tmp_path, here):
    run_dir = shutil.copytree(short, tmp_path / "run")
    code, _, err = here("train", "--resume", run_dir)
    assert code == 0
    assert "has already finished its 3 steps; --steps N with N above 3 prolongs it" in err
    code, _, err = here("train", "--resume", run_dir, "--set", "run.steps=4")
    assert code == 2
    assert "--resume continues a run as it was configured; of the options that change it --steps goes with it" in err
    code, _, err = here("train", "--resume", run_dir, "--steps", 4)
    assert code == 0, err
    assert [row["step"] for row in numbers(run_dir)] == [1, 2, 3, 4]
    assert "4 of 4 (up to step 3 with the schedules of 3 steps)" in render_page([read_run(run_dir)])
