"""What happens to runs: signals, terminals that hang up, pipes that close. Real processes, real signals."""

import os
import pty
import re
import signal

import pytest

from qerl.config.recipe import save_config
from tests.helpers.run_process import ended, forked, go, hold_in, run_cli, wait_for
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.run import resume, start
from training.run_dir.checkpoint import checkpoints
from training.run_dir.log import read_metrics
from training.run_dir.terminal_gone import TERMINAL_LOG
from training.trainer import QerlTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def held(nvfp4_base, tmp_path):
    """Start a run that waits in a step; (its process, run directory)."""

    def begin(step, output, *overrides, target=run_cli, leads=False):
        hold_in(tmp_path, step)
        config = small_config(nvfp4_base, tmp_path, *overrides)
        save_config(config, tmp_path / "recipe.yaml")
        process = forked(target, ["train", "--recipe", str(tmp_path / "recipe.yaml")], output, leads)
        wait_for((tmp_path / "held").exists, process)
        return process, tmp_path / "run"

    return begin


def steps_of(run_dir):
    return [row["step"] for row in read_metrics(run_dir)]


def test_sigterm_finishes_the_step_and_saves_though_nobody_reads_the_output(held, tmp_path, whole_run):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    process, run_dir = held(2, str(tmp_path / "pipe"))
    with ended(process):
        os.close(reader)  # as `| head` does
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGTERM)  # a scheduler may send it to the group and to the process
        go(tmp_path)
    assert process.exitcode == 128 + signal.SIGTERM
    assert steps_of(run_dir) == [1, 2, 3]
    assert checkpoints(run_dir)[-1].name == "step-000003"
    said = (run_dir / TERMINAL_LOG).read_text()
    assert "SIGTERM: stopping after this step" in said
    assert "step 3/6  reward" in said
    assert "stopped after step 3; continue with `qerl train --resume" in said
    assert "Traceback" not in said
    result = resume(run_dir)
    assert numbers(run_dir) == numbers(whole_run)
    assert same_adapters(result.adapter, whole_run / "adapter")


def without_hangups(*arguments):
    run_cli(*arguments, on_hangup=signal.SIG_IGN)  # as nohup does


@pytest.mark.parametrize(("target", "code"), [(run_cli, 128 + signal.SIGHUP), (without_hangups, 0)], ids=["", "nohup"])
def test_a_terminal_that_hangs_up_ends_the_run_with_its_step_saved_but_for_nohup(
    held, tmp_path, whole_run, target, code
):
    master, slave = pty.openpty()
    process, run_dir = held(2, os.ttyname(slave), target=target, leads=True)
    with ended(process):
        os.close(slave)
        os.close(master)  # the system sends SIGHUP to the terminal's process, and each write fails from now on
        go(tmp_path)
    assert process.exitcode == code
    assert numbers(run_dir) == numbers(whole_run)[: 3 if code else 6]
    assert checkpoints(run_dir)[-1].name == ("step-000003" if code else "step-000006")
    said = (run_dir / TERMINAL_LOG).read_text()
    assert ("SIGHUP: stopping after this step" if code else "step 6/6  reward") in said
    assert "Traceback" not in said
    assert code or "adapter in" in re.sub(r"\s+", " ", said)


ABANDONED = {  # the step, updates on one rollout, the step that is saved, and what is said
    "saved": (3, 1, 3, "step 4 did not end in time and is lost; the state after step 3 is saved"),
    "first": (0, 1, 0, "step 1 did not end in time; steps 1 to 1 are lost: there is no checkpoint yet"),
    "between two updates": (
        3,
        2,
        2,
        "step 4 did not end in time; steps 3 to 4 are lost: the checkpoint of step 2 stays",
    ),
}


@pytest.mark.parametrize("case", ABANDONED)
def test_a_step_that_takes_too_long_is_abandoned(nvfp4_base, tmp_path, monkeypatch, caplog, whole_run, case):
    step, updates, saved, said = ABANDONED[case]
    original = QerlTrainer.compute_loss
    config = small_config(nvfp4_base, tmp_path, f"loss.num_iterations={updates}", "run.stop_within_s=0.01")

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == step:
            signal.raise_signal(signal.SIGTERM)
            signal.pause()  # until the deadline
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(QerlTrainer, "compute_loss", interrupted)
        result = start(config, "tiny")
    assert (result.adapter, result.steps, result.stopped_by) == (None, saved, signal.SIGTERM)
    assert "or without it after 0.01 s (run.stop_within_s)" in caplog.text
    assert said in caplog.text
    assert [path.name for path in checkpoints(result.run_dir)][-1:] == ([f"step-{saved:06d}"] if saved else [])
    if saved == 3:
        assert numbers(resume(result.run_dir).run_dir) == numbers(whole_run)


def test_checkpoints_by_the_clock_respect_the_updates_on_one_rollout(nvfp4_base, tmp_path, monkeypatch):
    monkeypatch.setattr("training.run_dir.stop.SAVE_EVERY_S", 1e-3)
    settings = ("run.save_every=100", "run.keep_checkpoints=9")
    run_dir = start(small_config(nvfp4_base, tmp_path, *settings, steps=3), "tiny").run_dir
    assert [path.name for path in checkpoints(run_dir)] == ["step-000001", "step-000002", "step-000003"]
    twice = (*settings, "loss.num_iterations=2", "noise.enabled=false")
    run_dir = start(small_config(nvfp4_base, tmp_path, *twice, steps=4, out="twice"), "tiny").run_dir
    assert [path.name for path in checkpoints(run_dir)] == ["step-000002", "step-000004"]
