"""Intervals and pass@k agree with hand-computed values, brute force and simulation."""

import itertools
import math
import random

import pytest

from eval.metrics import effective_count, estimate, pass_at_k, wilson


@pytest.mark.parametrize(
    ("proportion", "count", "low", "high"),
    [
        # For 0 and n of n the interval is 0 .. z^2/(n+z^2) and its mirror image, with z^2 = 3.8414588.
        (0.0, 10, 0.0, 3.8414588 / 13.8414588),
        (1.0, 10, 10 / 13.8414588, 1.0),
        # Newcombe 1998 (doi 10.1002/(SICI)1097-0258(19980430)17:8<857), table I, method 3.
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0 / 20, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_values(proportion, count, low, high):
    assert wilson(proportion, count) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize(("proportion", "count"), [(0.5, 0), (1.1, 10), (-0.1, 10)])
def test_wilson_refuses_values_that_are_no_proportion(proportion, count):
    with pytest.raises(ValueError, match="no interval"):
        wilson(proportion, count)


def test_one_sample_per_question_gives_the_plain_wilson_interval():
    values = [1.0] * 30 + [0.0] * 70
    result = estimate(values, samples=1)
    assert (result.value, (result.low, result.high)) == (0.3, wilson(0.3, 100))


def test_equal_completions_of_a_question_count_once():
    assert effective_count([1.0, 0.0, 1.0, 0.0], samples=8) == 4


def test_independent_completions_all_count():
    # Every question is at 0.5: without a spread between questions, 4 questions x 8 samples are 32 trials.
    assert effective_count([0.5] * 4, samples=8) == 32


def test_the_effective_count_in_between_follows_the_design_effect():
    values = [0.25, 0.75, 0.25, 0.75]  # variance of the mean = (4 * 0.0625 / 3) / 4, p(1-p) = 0.25
    assert effective_count(values, samples=8) == pytest.approx(0.25 / (0.25 / 3 / 4))


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_interval_keeps_a_width_if_all_are_right_or_wrong(mean):
    result = estimate([mean] * 30, samples=16)
    assert (result.low, result.high) == wilson(mean, 30)
    assert result.high - result.low > 0.1


def test_interval_covers_the_truth_when_questions_differ_in_difficulty():
    """30 questions, difficulties uniform in [0, 1], 8 samples each: the true mean is 0.5, the nominal coverage 95%."""
    rng = random.Random(0)
    trials, covered = 2000, 0
    for _ in range(trials):
        difficulties = [rng.random() for _ in range(30)]
        values = [sum(rng.random() < difficulty for _ in range(8)) / 8 for difficulty in difficulties]
        result = estimate(values, samples=8)
        covered += result.low <= 0.5 <= result.high
    assert 0.93 < covered / trials < 0.97


def test_estimate_refuses_no_questions():
    with pytest.raises(ValueError, match="no question"):
        estimate([], samples=1)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_equals_drawing_every_subset(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        graded = [True] * correct + [False] * (samples - correct)
        subsets = list(itertools.combinations(graded, k))
        by_hand = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(samples, correct, k) == pytest.approx(by_hand), (samples, correct, k)


def test_pass_at_1_is_the_mean_and_large_counts_do_not_overflow():
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert math.isfinite(pass_at_k(4096, 100, 2048))


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_impossible_draws(samples, correct, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, correct, k)
