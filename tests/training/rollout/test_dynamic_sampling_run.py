"""Whole runs with dynamic sampling: full batches, right numbers over several rollouts, and resuming inside a step."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import training.step
from qerl.engine.transformers.engine import TransformersEngine
from tests.helpers.killed import Killed
from tests.helpers.small_run import numbers, small_config
from training.rollout.prompts import rollout_rows
from training.run import resume, start
from training.run_dir.log import read_metrics

ROWS = 40
OVERLAPPING = ("time/step_s", "time/train_s", "time/extra_rollouts_s")
ONE_IN_FOUR = '''
from pathlib import Path


def digits(completions, row, log_metric=None, **columns):
    """Differs within a group for every fourth row only. Writes down which rows it was asked for."""
    with (Path(__file__).parent / "asked.txt").open("a") as handle:
        handle.write(" ".join(map(str, row[::4])) + "\\n")
    log_metric("asked/mean_row", sum(row) / len(row))
    return [len(set(text)) if number % 4 == 0 else 1.0 for text, number in zip(completions, row)]
'''
SETTINGS = (
    *("rollout.dynamic_sampling.enabled=true", f"data.limit={ROWS}", "logging.completions_count=8"),
    "loss.mismatch_gate=null",  # else a trial adapter comes before the first rollout
)


def configured(base, folder, *overrides, **kwargs):
    (folder / "reward.py").write_text(ONE_IN_FOUR)
    return small_config(base, folder, *SETTINGS, *overrides, **kwargs)


@pytest.fixture(scope="module")
def watched(nvfp4_base, tmp_path_factory):
    """(a finished run, for each of its rollouts the seed and the sum of the noise, or None)."""
    calls, noises = [], []
    generate, set_noise = TransformersEngine.generate, TransformersEngine.set_noise

    def noisy(self, noise):
        noises.append(None if noise is None else sum(vector.sum().item() for vector in noise.values()))
        return set_noise(self, noise)

    def spied(self, prompts, sampling, seed, *more, **others):
        calls.append((seed, noises[-1]))
        return generate(self, prompts, sampling, seed, *more, **others)

    config = configured(nvfp4_base, tmp_path_factory.mktemp("finished"), "logging.completions_every=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", spied)
        patch.setattr(TransformersEngine, "set_noise", noisy)
        return start(config, "tiny").run_dir, calls


@pytest.fixture(scope="module")
def finished(watched):
    return watched[0]


def asked(run_dir):
    """The rows of each rollout in order."""
    return [[int(word) for word in line.split()] for line in (run_dir.parent / "asked.txt").read_text().splitlines()]


def test_every_batch_is_full_of_groups_with_a_signal(finished):
    rows = numbers(finished)
    assert [row["dynamic_sampling/filled_groups"] for row in rows] == [0] * 6
    assert [row["groups/zero_variance_share"] for row in rows] == [0] * 6
    assert sum(row["dynamic_sampling/extra_rollouts"] for row in rows) >= 4
    for step in range(1, 7):
        samples = [json.loads(line) for line in (finished / f"completions/step-{step:06d}.jsonl").open()]
        assert len(samples) == 8
        for group in (samples[:4], samples[4:]):  # trained on and logged are whole groups with a signal
            assert len({sample["prompt"] for sample in group}) == 1
            assert len({sample["rewards"]["digits"] for sample in group}) > 1
            assert sum(sample["advantage"] for sample in group) == pytest.approx(0, abs=1e-5)


def test_the_counts_are_those_of_all_samples(finished):
    rollouts = iter(asked(finished))
    for number, row in enumerate(numbers(finished)):
        step = [next(rollouts) for _ in range(1 + int(row["dynamic_sampling/extra_rollouts"]))]
        assert step[0] == rollout_rows(ROWS, 2, 0, number)  # the data order does not depend on extra prompts before
        flat = [member for rollout in step for member in rollout]
        assert row["dynamic_sampling/sampled_groups"] == len(flat) == len(set(flat))
        assert row["dynamic_sampling/discarded_groups"] == len(flat) - 2
        assert row["dynamic_sampling/informative_share"] <= sum(member % 4 == 0 for member in flat) / len(flat)
        assert row["asked/mean_row"] == pytest.approx(sum(flat) / len(flat), rel=1e-6)
        assert row["sampled/digits"] == row["sampled/reward"]
        assert (row["sampled/reward"] < row["reward"]) == (len(flat) > 2)  # 1 where nothing differs
    assert next(rollouts, None) is None


def test_the_summary_of_the_run_has_the_totals(finished, caplog):
    with caplog.at_level("INFO"):
        resume(finished)  # nothing is left to do, so it only says how it ended
    assert "dynamic sampling: 12 of the 12 groups trained on had a signal; " in caplog.text


def test_time_and_speed_include_all_rollouts(finished):
    for row in read_metrics(finished):
        assert (row["time/extra_rollouts_s"] > 0) == (row["dynamic_sampling/extra_rollouts"] > 0)
        assert row["time/rollout_s"] + row["time/train_s"] <= row["time/step_s"] * 1.01
        parts = {key: row[key] for key in row if key.startswith("time/") and key not in OVERLAPPING}
        assert len(parts) == 8
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(row["time/step_s"])
        tokens = row["dynamic_sampling/discarded_tokens"] + row["completions/mean_tokens"] * 8
        assert row["speed/rollout_tokens_per_s"] * row["time/rollout_s"] == pytest.approx(tokens)


def test_each_logged_time_is_explained(finished):
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    logged = {key for row in read_metrics(finished) for key in row if key.startswith("time/")}
    assert sorted(re.findall(r"^\| `(time/\w+)` \|", page, re.MULTILINE)) == sorted(
        {*logged, "time/validation_s", "time/reduce_s", "time/teacher_s"}  # one process, no validation, no teacher
    )


def test_extra_rollouts_have_the_noise_of_their_step_and_their_own_seeds(watched):
    """A prompt that is sampled again in a step must not give the same completions."""
    run_dir, calls = watched
    rows = numbers(run_dir)
    assert len({seed for seed, _ in calls}) == len(calls) > len(rows)
    rest = iter(noise for _, noise in calls)
    for row in rows:
        of_step = {next(rest) for _ in range(1 + int(row["dynamic_sampling/extra_rollouts"]))}
        assert len(of_step) == 1
        assert (of_step == {None}) == (row["noise/sigma"] == 0)


@pytest.mark.parametrize("when", ["sampling", "grading"])
def test_a_run_killed_in_an_extra_rollout_resumes_to_equal_numbers(nvfp4_base, tmp_path, finished, monkeypatch, when):
    function, at = {"sampling": ("sample", (4, 1)), "grading": ("grade", (4, 1))}[when]
    original = getattr(training.step, function)
    rollouts, died = Counter(), []

    def dying(parts, given, moment, *rest, **attempt):
        rollouts[moment] += 1
        if (moment, rollouts[moment] - 1) == at:
            died.append(1)
            raise Killed
        return original(parts, given, moment, *rest, **attempt)

    config = configured(nvfp4_base, tmp_path, "logging.completions_every=1")
    with monkeypatch.context() as patch:
        patch.setattr(training.step, function, dying)
        with pytest.raises(Killed):
            start(config, "tiny")
    assert died
    assert numbers(resume(tmp_path / "run").run_dir) == numbers(finished)


def test_a_group_of_masked_truncated_completions_has_no_signal(nvfp4_base, tmp_path, monkeypatch):
    """The random base never ends a completion. All are masked, so nothing can fill the batch, and the run says so."""
    monkeypatch.setattr("training.rollout.dynamic_sampling.MAX_EXTRA_ROLLOUTS", 1)
    config = configured(nvfp4_base, tmp_path, "loss.mask_truncated=true", "rollout.max_new_tokens=2", steps=3)
    rows = numbers(start(config, "tiny").run_dir)
    assert rows[0]["dynamic_sampling/extra_rollouts"] == 1
    assert rows[0]["dynamic_sampling/filled_groups"] == 2
    assert rows[0]["loss"] == 0


def test_several_updates_on_one_rollout_count_the_rollout_once(nvfp4_base, tmp_path):
    rows = numbers(start(configured(nvfp4_base, tmp_path, "loss.num_iterations=2"), "tiny").run_dir)
    assert ["dynamic_sampling/sampled_groups" in row for row in rows] == [True, False] * 3
    assert [row["clip/share"] for row in rows[::2]] == [0, 0, 0]  # old logprobs are those of the kept completions
