"""Sigma by stage equals values computed by hand, and noise depends only on seed and step."""

import json
import math
from pathlib import Path

import pytest
import torch

from qerl.config.noise import NoiseConfig
from training.rollout.noise import NoiseSchedule, draw_noise, stage_of, stage_sigmas

SIZES = {"model.layers.0.input_layernorm": 4096, "model.layers.1.input_layernorm": 4096}

TABLES = json.loads(
    (Path(__file__).parents[2] / "golden" / "noise_sigma.json").read_text()
)  # by scripts/checks/golden_noise.py of commit 812ec811


def config_of(row):
    """The configuration of a row of the tables; None for the paper's stages with another schedule."""
    given = {key: value for key, value in row.items() if key not in ("sigmas", "indexing")}
    if row["indexing"] == "paper" and row["schedule"] != "exponential":
        return None
    return NoiseConfig(**{**given, "schedule": "paper"} if row["indexing"] == "paper" else given)


def test_sigma_of_each_stage():
    for row in TABLES["sigmas"]:
        if (config := config_of(row)) is None:
            continue
        assert stage_sigmas(config) == pytest.approx(row["sigmas"], rel=1e-12)


# From 1e-2 to 1e-4 over 4 stages, computed by hand. In the code x = 0, 1/2, 1; in the paper x = 0, 1/3, 2/3.
BY_HAND = {
    ("exponential", "code"): [0, 1e-2, 1e-3, 1e-4],  # 1e-2 * 0.01^(1/2)
    ("exponential", "paper"): [0, 1e-2, 2.1544346900e-3, 4.6415888336e-4],
    ("linear", "code"): [0, 1e-2, 5.05e-3, 1e-4],
    ("cosine", "code"): [0, 1e-2, 5.05e-3, 1e-4],  # cos(pi/2) = 0
    ("logarithmic", "code"): [0, 1e-2, 1e-2 - 9.9e-3 * 0.6201145070, 1e-4],  # ln(1 + (e - 1) / 2)
}


@pytest.mark.parametrize(("schedule", "indexing"), BY_HAND)
def test_the_golden_tables_equal_values_computed_by_hand(schedule, indexing):
    wanted = {"sigma_start": 1e-2, "sigma_end": 1e-4, "num_stages": 4, "schedule": schedule, "indexing": indexing}
    (row,) = [row for row in TABLES["sigmas"] if wanted.items() <= row.items()]
    assert row["sigmas"] == pytest.approx(BY_HAND[schedule, indexing], rel=1e-9)


def test_stages_begin_at_the_right_step():
    for row in TABLES["first_steps"]:
        steps, stages = row["steps"], row["num_stages"]
        found = [stage_of(step, steps, stages) for step in range(steps)]
        assert [found.index(stage) if stage in found else None for stage in range(stages)] == row["first_steps"]
        assert found == sorted(found)
        assert found[0] == 0
    # Departure 5: step 26 of 52 is half, so it is in stage 5 of 10, though the code's 26 // 5.2 is 4.0.
    assert [stage_of(step, 100, 10) for step in (9, 10, 99, 250)] == [0, 1, 9, 9]
    assert stage_of(26, 52, 10) == 5


@pytest.mark.parametrize(("schedule", "last"), [("exponential", 1e-4), ("paper", 1.6681005372e-4)])
def test_first_and_last_step_of_a_run(schedule, last):
    """With the scripts' values: first no noise; last sigma_end as in the code, 1e-2 * 0.01^(8/9) as in the paper."""
    config = NoiseConfig(sigma_end=1e-4, schedule=schedule)
    schedule = NoiseSchedule(config, SIZES, steps=997, seed=0)
    assert schedule.at(0).sigma == 0
    assert schedule.at(996).sigma == schedule.at(2000).sigma == pytest.approx(last, rel=1e-9)


def test_noise_depends_only_on_seed_and_step():
    first = draw_noise(SIZES, 1e-2, seed=3, step=5)
    torch.randn(100)  # the global generator has no influence
    again = draw_noise(SIZES, 1e-2, seed=3, step=5)
    assert all(torch.equal(first[name], again[name]) for name in SIZES)
    for other in (draw_noise(SIZES, 1e-2, seed=4, step=5), draw_noise(SIZES, 1e-2, seed=3, step=6)):
        assert not any(torch.equal(first[name], other[name]) for name in SIZES)
    assert not torch.equal(*first.values())  # norms have different noise


def test_noise_has_the_stated_standard_deviation():
    noise = NoiseSchedule(NoiseConfig(), SIZES, steps=10, seed=0).at(1)
    assert (noise.stage, noise.sigma) == (1, 1e-2)
    values = torch.cat(list(noise.vectors.values()))
    assert values.dtype == torch.float32
    # With 8192 draws the sample std is within 4 standard errors, which are sigma / sqrt(2 n).
    assert abs(noise.std - 1e-2) < 4 * 1e-2 / math.sqrt(2 * values.numel())
    assert abs(values.mean().item()) < 4 * 1e-2 / math.sqrt(values.numel())


def test_stage_zero_and_disabled_noise_have_none():
    for config in (NoiseConfig(), NoiseConfig(enabled=False)):
        noise = NoiseSchedule(config, SIZES, steps=10, seed=0).at(0)
        assert (noise.sigma, noise.vectors, noise.std) == (0.0, None, 0.0)
    assert NoiseSchedule(NoiseConfig(enabled=False), SIZES, steps=10, seed=0).at(9).vectors is None
