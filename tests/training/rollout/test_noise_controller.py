"""The controller: its rule by hand, and real runs in which sigma reaches its target, also after a kill."""

import json
import math

import pytest
from killed import killed_in
from small_run import small_config

from qerl.config.noise import NoiseConfig
from training.rollout.noise import NoiseSchedule
from training.rollout.noise_controller import control
from training.rollout.sampler import Sampler
from training.run import resume, start
from training.run_dir.checkpoint import checkpoints
from training.run_dir.log import deterministic, read_metrics
from training.trainer import QerlTrainer

SIZES = {"model.layers.0.input_layernorm": 64}


pytestmark = pytest.mark.usefixtures("one_thread")


def config(metric, target, **settings):
    start = settings.pop("sigma_start", 0.02)
    return NoiseConfig(sigma_start=start, controller={"metric": metric, "target": target, **settings})


def entropies(*pairs):
    return [{"noise/sigma": sigma, "sampling/entropy": value} for sigma, value in pairs]


def samples(*pairs):
    return [{"noise/sigma": sigma, "correction/ess": value} for sigma, value in pairs]


def test_the_rule_for_entropy_by_hand():
    """With gain 1, (1 - 0.8) / 1 = 0.2, so sigma grows by exp(0.2); above the target it falls."""
    this = config("entropy", 1.0, gain=1.0)
    low, high = control(this, entropies((0.02, 0.8))), control(this, entropies((0.02, 1.3)))
    assert (low.sigma, low.error) == (pytest.approx(0.02 * 1.2214027582), pytest.approx(0.2))
    assert (high.sigma, high.error) == (pytest.approx(0.02 * 0.7408182207), pytest.approx(-0.3))
    assert control(config("entropy", 1.0, gain=0.5), entropies((0.02, 0.8))).sigma == pytest.approx(0.02 * 1.1051709181)


def test_the_rule_for_the_effective_sample_size_by_hand():
    """With gain 1 and 1 - ess = c sigma^2, one step reaches the target: 0.01 lost of 0.02 makes it sigma sqrt(2)."""
    this = config("ess", 0.98, gain=1.0)
    assert control(this, samples((0.02, 0.99))).sigma == pytest.approx(0.02 * math.sqrt(2))
    assert control(this, samples((0.02, 0.97))).sigma == pytest.approx(0.02 * math.sqrt(2 / 3))
    assert control(this, samples((0.02, 0.98))).sigma == pytest.approx(0.02)


def test_a_change_is_at_most_a_factor_of_two_and_stays_within_the_bounds():
    this = config("ess", 0.98, gain=4.0, sigma_min=0.015, sigma_max=0.03)
    up, down = control(this, samples((0.012, 1.0))), control(this, samples((0.04, 0.0)))
    assert (up.sigma, up.at_bound) == (pytest.approx(0.024), False)
    assert (down.sigma, down.at_bound) == (pytest.approx(0.02), False)
    for value, bound in ((1.0, 0.03), (0.1, 0.015)):
        held = control(this, samples((0.02, value)))
        assert (held.sigma, held.at_bound) == (bound, True)


def test_the_first_rollout_is_clean_and_the_second_has_sigma_start():
    this = config("entropy", 1.0)
    assert control(this, []).sigma == 0
    assert control(this, [{"noise/sigma": 0.0, "loss": 0.1}]).sigma == 0  # nothing is measured yet
    assert control(this, entropies((0.0, 5.0))).sigma == 0.02
    schedule = NoiseSchedule(this, SIZES, steps=10, seed=0)
    clean, noisy = schedule.at(0, []), schedule.at(1, entropies((0.0, 5.0)))
    assert (clean.stage, clean.vectors) == (0, None)
    assert (noisy.stage, noisy.sigma) == (1, 0.02)
    assert noisy.vectors["model.layers.0.input_layernorm"].std().item() == pytest.approx(0.02, rel=0.3)


def test_a_step_without_the_number_leaves_sigma_unchanged():
    this = config("entropy", 1.0, gain=1.0)
    measured = entropies((0.0, 0.5), (0.02, 0.8))
    after = control(this, measured).sigma
    gap = [{"noise/sigma": after, "loss": 0.0}]  # a second update on the same rollout, or no tokens in the loss
    assert control(this, measured + gap + gap).sigma == after


RUN = (
    "noise.controller.sigma_max=2.0",
    "noise.controller.gain=1.0",
    "rollout.prompts_per_step=4",
    "noise.num_stages=9",
)
ESS = (*RUN, "noise.controller.metric=ess", "noise.controller.target=0.97")


@pytest.fixture(scope="module")
def finished(nvfp4_base, tmp_path_factory):
    """An uninterrupted run of 8 steps, which begins with a sixteenth of the noise that its target allows."""
    folder = tmp_path_factory.mktemp("controlled")
    return start(small_config(nvfp4_base, folder, *ESS, "noise.sigma_start=0.0025", steps=8), "tiny").run_dir


def test_sigma_rises_until_the_target_is_reached(finished, nvfp4_base, tmp_path):
    rows = read_metrics(finished)
    sigmas = [row["noise/sigma"] for row in rows]
    assert sigmas[:5] == [0, 0.0025, 0.005, 0.01, 0.02]  # it doubles, as the target is far away
    assert rows[0]["correction/ess"] == pytest.approx(1)
    assert all(row["correction/ess"] > 0.985 for row in rows[1:4])
    assert sum(row["correction/ess"] for row in rows[-2:]) / 2 == pytest.approx(0.97, abs=0.015)
    assert all(row["noise/at_bound"] == 0 for row in rows)
    from_above = small_config(nvfp4_base, tmp_path, *ESS, "noise.sigma_start=0.3", steps=8)
    fallen = [row["noise/sigma"] for row in read_metrics(start(from_above, "tiny").run_dir)]
    assert fallen[1] > fallen[2] > fallen[3] > fallen[4]
    assert 0.5 < fallen[-1] / sigmas[-1] < 2  # at the start the ratio was 120


def test_the_entropy_of_a_trained_model_is_raised_to_its_target(tmp_path):
    """The embedded model is certain (0.4 nats). Learning is almost off, so that only sigma changes the entropy."""
    settings = ("noise.controller.metric=entropy", "noise.controller.target=1.2", "noise.sigma_start=0.2")
    settings += ("model.format=bf16", "rollout.max_new_tokens=24", "optim.learning_rate=1e-6")
    settings += ("run.micro_batch_tokens=1000", "run.save_every=7")
    rows = read_metrics(start(small_config("tiny", tmp_path, *RUN, *settings, steps=7), "tiny").run_dir)
    found = [row["sampling/entropy"] for row in rows]
    assert found[0] < 0.7
    assert abs(sum(found[3:]) / 4 - 1.2) < 0.45  # effects of single noise draws differ, so one step says little
    assert max(row["noise/sigma"] for row in rows) > 0.35


@pytest.mark.parametrize("place", [(Sampler, "sample", 6), (QerlTrainer, "loss_of", 27)])
def test_a_controlled_run_that_died_resumes_to_the_same_numbers(finished, nvfp4_base, tmp_path, place):
    with killed_in(*place):
        start(small_config(nvfp4_base, tmp_path, *ESS, "noise.sigma_start=0.0025", steps=8), "tiny")
    assert 0 < len(read_metrics(tmp_path / "run")) < 8
    resumed = resume(tmp_path / "run").run_dir
    assert [deterministic(row) for row in read_metrics(resumed)] == [
        deterministic(row) for row in read_metrics(finished)
    ]
    history = json.loads((checkpoints(resumed)[-1] / "trainer_state.json").read_text())["log_history"]
    assert [row["noise/sigma"] for row in history] == [row["noise/sigma"] for row in read_metrics(finished)]


def test_the_fixed_schedule_does_not_read_the_history(finished, nvfp4_base, tmp_path):
    rows = read_metrics(start(small_config(nvfp4_base, tmp_path, steps=3), "tiny").run_dir)
    assert [row["noise/sigma"] for row in rows] == [0, 0.05, 0.01]
    assert all("noise/control_error" not in row and row["sampling/entropy"] > 0 for row in rows)
