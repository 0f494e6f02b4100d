"""Whole runs with validation: their numbers, their best checkpoint, what ends them, and how they resume."""

import json
import shutil
import signal

import pytest
import torch

import training.validate
from qerl.base.errors import ConfigError
from qerl.checkpoint.resolve import resolve_model
from qerl.engine.transformers.engine import TransformersEngine
from qerl.report.page import render_page, render_text
from qerl.report.read import read_run
from qerl.report.sections import validation_table
from tests.helpers.small_run import numbers, same_adapters, small_config
from tests.helpers.validated_run import validated_config, validated_steps, without_validation
from training.parts import Parts
from training.run import resume, start
from training.run_dir.checkpoint import checkpoints
from training.run_dir.log import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def validated(nvfp4_base, tmp_path_factory):
    """The same run with a validation every second step, which keeps one checkpoint beside the best."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("validated")
    return start(validated_config(nvfp4_base, folder, "run.keep_checkpoints=1"), "tiny").run_dir


def rewards(run_dir):
    return {row["step"]: row["validation/reward"] for row in read_metrics(run_dir) if "validation/reward" in row}


def best_step(run_dir):
    values = rewards(run_dir)
    return max((step for step in values if step), key=lambda step: (values[step], -step))


def test_validation_changes_no_number_of_the_run(whole_run, validated):
    assert validated_steps(validated) == [0, 2, 4, 6]
    assert without_validation(validated) == numbers(whole_run)
    assert same_adapters(validated / "adapter", whole_run / "adapter")


def test_what_a_validation_writes_keeps_and_shows(validated):
    rows = {row["step"]: row for row in read_metrics(validated)}
    assert {key for key in rows[0] if not key.startswith("validation/")} == {"step", "time/validation_s"}
    assert rows[4]["validation/accuracy_low"] <= rows[4]["validation/accuracy"] <= rows[4]["validation/accuracy_high"]
    assert rows[4]["validation/mean_tokens"] <= 8
    assert 0 <= rows[4]["validation/truncated_share"] <= 1
    assert rows[4]["validation/rewards/digits"] == rows[4]["validation/reward"]
    assert len(set(rewards(validated).values())) > 1  # else no test here tells one validation from another
    best = best_step(validated)
    assert [path.name for path in checkpoints(validated)] == [f"step-{step:06d}" for step in sorted({best, 6})]
    assert same_adapters(validated / "best", validated / "checkpoints" / f"step-{best:06d}")
    said = json.loads((validated / "best" / "validation.json").read_text())
    assert said == {"step": best, "metric": "reward", "value": rewards(validated)[best]}
    found = resolve_model(str(validated / "best"))
    assert (found.kind, found.adapter) == ("adapter", validated / "best")
    run = read_run(validated)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    shown = [(line[0], line[-1]) for line in validation_table(run)[1]]
    assert shown == [(str(step), "best" if step == best else "") for step in (0, 2, 4, 6)]
    assert "| step | accuracy | 95% interval |" in render_text(run)
    assert '<h2 id="validation">' in render_page([run])


def test_noise_that_stays_in_the_policy_is_off_in_a_validation_and_put_back(nvfp4_base, tmp_path, monkeypatch):
    """A validation after each second update on a rollout finds the noise of `where: both` in the policy's norms."""
    both = ("noise.where=both", "loss.num_iterations=2", "loss.mismatch_gate=null")  # without a trial adapter
    plain = start(small_config(nvfp4_base, tmp_path, *both, out="plain", steps=4), "tiny").run_dir
    norms, original = [], TransformersEngine.generate

    def watched(self, *args, **kwargs):
        modules = self.policy_model().named_modules()
        norms.append({"forward" in vars(module) for name, module in modules if "norm" in name})
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", watched)
    run_dir = start(validated_config(nvfp4_base, tmp_path, *both, steps=4), "tiny").run_dir
    assert without_validation(run_dir) == numbers(plain)
    assert [row["noise/sigma"] for row in numbers(plain)] == [0, 0, 0.05, 0.05]
    noisy = [any(each) for each in norms]  # validation, rollout, validation, rollout, validation
    assert noisy == [False, False, False, True, False]


@pytest.fixture
def signalled(monkeypatch):
    """Let a signal come in the first batch of a validation, after which the engine asks whether to go on."""

    def at(number, validation):
        original, calls = Parts.measure, []

        def measure(parts, step, stop):
            calls.append(step)
            if len(calls) == validation:
                leave = stop.leave_if_asked
                stop.leave_if_asked = lambda *given: (signal.raise_signal(number), leave(*given))
            return original(parts, step, stop)

        monkeypatch.setattr(Parts, "measure", measure)

    return at


def test_a_signal_in_a_validation_saves_and_stops_and_the_run_resumes_with_it(
    validated, nvfp4_base, tmp_path, monkeypatch, caplog, signalled
):
    signalled(signal.SIGINT, 3)
    result = start(validated_config(nvfp4_base, tmp_path, "run.keep_checkpoints=1"), "tiny")
    assert (result.steps, result.adapter, result.stopped_by) == (4, None, signal.SIGINT)
    assert "leaving the validation to save and stop; interrupt again to stop at once" in caplog.text
    assert "the validation after step 4 was left before its end; a resumed run makes it first" in caplog.text
    assert [row["step"] for row in read_metrics(result.run_dir)] == [0, 1, 2, 3, 4]
    assert validated_steps(result.run_dir) == [0, 2]
    monkeypatch.undo()
    result = resume(result.run_dir)
    assert numbers(result.run_dir) == numbers(validated)
    assert same_adapters(result.adapter, validated / "adapter")
    assert same_adapters(result.run_dir / "best", validated / "best")


def test_a_validation_that_takes_too_long_after_sigterm_is_abandoned(nvfp4_base, tmp_path, monkeypatch, caplog):
    original = training.validate.reward_metrics
    rounds = []

    def slow(*given):
        rounds.append(1)
        if len(rounds) == 2:
            signal.raise_signal(signal.SIGTERM)
            signal.pause()  # until the deadline
        return original(*given)

    monkeypatch.setattr(training.validate, "reward_metrics", slow)
    settings = ("run.stop_within_s=0.01", "noise.enabled=false")
    result = start(validated_config(nvfp4_base, tmp_path, *settings, steps=3), "tiny")
    assert (result.steps, result.adapter, result.stopped_by) == (2, None, signal.SIGTERM)
    assert [path.name for path in checkpoints(result.run_dir)] == ["step-000002"]
    assert "the validation after step 2 was left before its end" in caplog.text
    assert [row["step"] for row in read_metrics(result.run_dir)] == [0, 1, 2]


def without_improvement(folder):
    """Settings by which the first validation after a step ends the run."""
    (folder / "same.py").write_text("def same(completions, **columns):\n    return [0.5] * len(completions)\n")
    reward = f"rewards=[{{name: accuracy}}, {{name: '{folder}/same.py:same'}}]"
    return reward, "validation.metric=rewards/same", "validation.stop_after=1", "noise.enabled=false"


def test_a_run_that_does_not_improve_is_finished(nvfp4_base, tmp_path, caplog):
    ends = 2
    caplog.set_level("INFO")
    result = start(validated_config(nvfp4_base, tmp_path, *without_improvement(tmp_path)), "tiny")
    assert result.steps == ends
    assert same_adapters(result.adapter, result.run_dir / "checkpoints" / f"step-{ends:06d}")
    assert f"(validation.stop_after 1): the run ends after step {ends}" in caplog.text
    before = (result.run_dir / "metrics.jsonl").read_bytes()
    shutil.rmtree(result.run_dir / "adapter")  # as if it was killed before its end
    shutil.rmtree(result.run_dir / "best")
    again = resume(result.run_dir)
    assert (again.steps, again.adapter) == (ends, result.adapter)
    assert (result.run_dir / "best").is_dir()
    assert (result.run_dir / "metrics.jsonl").read_bytes() == before


def test_an_interrupted_validation_that_ends_the_run_does_so_when_it_is_made_up_for(
    nvfp4_base, tmp_path, monkeypatch, signalled
):
    signalled(signal.SIGINT, 2)
    result = start(validated_config(nvfp4_base, tmp_path, *without_improvement(tmp_path), steps=3), "tiny")
    assert (result.steps, result.adapter) == (2, None)
    monkeypatch.undo()
    result = resume(result.run_dir)
    assert (result.steps, validated_steps(result.run_dir)) == (2, [0, 2])
    assert same_adapters(result.adapter, result.run_dir / "checkpoints" / "step-000002")


def test_changed_validation_rows_are_noticed_on_resume(validated, tmp_path):
    run_dir = shutil.copytree(validated, tmp_path / "run")
    config = (run_dir / "config.yaml").read_text()
    rows = validated.parent / "questions.jsonl"
    (tmp_path / "questions.jsonl").write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    (run_dir / "config.yaml").write_text(config.replace(str(rows), str(tmp_path / "questions.jsonl")))
    with pytest.raises(ConfigError, match="the validation's rows changed"):
        resume(run_dir, steps=8)
