"""Sigma by stage against values worked out by hand, and noise as a function of (seed, step) alone."""

import math
from itertools import pairwise

import pytest
import torch

from qerl.config import NoiseConfig
from training.noise import NoiseSchedule, draw_noise, stage_of, stage_sigmas

SIZES = {"model.layers.0.input_layernorm": 4096, "model.layers.1.input_layernorm": 4096}

# Exponential from 1e-2 to 1e-4 over 4 stages. Code: exponents 0, 1/2, 1; paper, as printed: 0, 1/3, 2/3.
GOLDEN = {
    ("exponential", "code"): [0, 1e-2, 1e-3, 1e-4],
    ("exponential", "paper"): [0, 1e-2, 2.1544346900e-3, 4.6415888336e-4],
    ("linear", "code"): [0, 1e-2, 5.05e-3, 1e-4],
    ("linear", "paper"): [0, 1e-2, 6.7e-3, 3.4e-3],
    ("cosine", "code"): [0, 1e-2, 5.05e-3, 1e-4],
    ("cosine", "paper"): [0, 1e-2, 7.525e-3, 2.575e-3],
    # ln(1 + (e - 1) / 2) = 0.6201145070
    ("logarithmic", "code"): [0, 1e-2, 1e-2 - 9.9e-3 * 0.6201145070, 1e-4],
}


@pytest.mark.parametrize(("schedule", "indexing"), GOLDEN)
def test_sigma_of_each_stage(schedule, indexing):
    config = NoiseConfig(sigma_start=1e-2, sigma_end=1e-4, num_stages=4, schedule=schedule, indexing=indexing)
    assert stage_sigmas(config) == pytest.approx(GOLDEN[schedule, indexing], rel=1e-8)


def test_paper_recipe_of_ten_stages_ends_where_it_says():
    sigmas = stage_sigmas(NoiseConfig())
    assert len(sigmas) == 10
    assert sigmas[0] == 0
    assert sigmas[1] == 1e-2
    assert sigmas[-1] == pytest.approx(5e-4)
    ratios = [b / a for a, b in pairwise(sigmas[1:])]
    assert ratios == pytest.approx([20 ** (-1 / 8)] * 8)


@pytest.mark.parametrize(("step", "stage"), [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (99, 9), (100, 9), (250, 9)])
def test_stages_are_equal_intervals(step, stage):
    assert stage_of(step, 100, 10) == stage


def test_stages_when_steps_do_not_divide():
    assert [stage_of(step, 7, 3) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]


def test_noise_depends_on_seed_and_step_alone():
    first = draw_noise(SIZES, 1e-2, seed=3, step=5)
    torch.randn(100)  # the global generator plays no part
    again = draw_noise(SIZES, 1e-2, seed=3, step=5)
    assert all(torch.equal(first[name], again[name]) for name in SIZES)
    for other in (draw_noise(SIZES, 1e-2, seed=4, step=5), draw_noise(SIZES, 1e-2, seed=3, step=6)):
        assert not any(torch.equal(first[name], other[name]) for name in SIZES)
    assert not torch.equal(*first.values())  # norms differ from one another


def test_noise_has_the_standard_deviation_it_claims():
    noise = NoiseSchedule(NoiseConfig(), SIZES, steps=10, seed=0).at(1)
    assert (noise.stage, noise.sigma) == (1, 1e-2)
    values = torch.cat(list(noise.vectors.values()))
    assert values.dtype == torch.float32
    # 8192 draws: the sample std is within 4 standard errors, sigma / sqrt(2 n)
    assert abs(noise.std - 1e-2) < 4 * 1e-2 / math.sqrt(2 * values.numel())
    assert abs(values.mean().item()) < 4 * 1e-2 / math.sqrt(values.numel())


def test_stage_zero_and_disabled_noise_have_none():
    for config in (NoiseConfig(), NoiseConfig(enabled=False)):
        noise = NoiseSchedule(config, SIZES, steps=10, seed=0).at(0)
        assert (noise.sigma, noise.vectors, noise.std) == (0.0, None, 0.0)
    assert NoiseSchedule(NoiseConfig(enabled=False), SIZES, steps=10, seed=0).at(9).vectors is None
