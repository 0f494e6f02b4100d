"""Intervals and pass@k agree with hand-computed values, brute force and simulation."""

import itertools
import math
import os

import numpy as np
import pytest

from qerl.data.grading.intervals import estimate, lower_limit, pass_at_k, wilson


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


def clopper_pearson(correct, count):
    """The exact 95% interval, by bisection on binomial tails."""
    return lower_exact(correct, count), 1 - lower_exact(count - correct, count)


def lower_exact(correct, count):
    low, high = 0.0, 1.0 if correct else 0.0
    for _ in range(60):
        middle = (low + high) / 2
        tail = sum(math.comb(count, k) * middle**k * (1 - middle) ** (count - k) for k in range(correct, count + 1))
        low, high = (low, middle) if tail > 0.025 else (middle, high)
    return low


@pytest.mark.parametrize(
    ("correct", "count"), [(0, 20), (20, 20), (1, 30), (15, 30), (29, 30), (15, 148), (81, 263), (288, 300), (300, 300)]
)
def test_one_sample_per_question_gives_the_exact_interval(correct, count):
    result = estimate([1.0] * correct + [0.0] * (count - correct))
    exact = clopper_pearson(correct, count)
    assert (result.value, result.low, result.high) == (
        pytest.approx(correct / count),
        pytest.approx(exact[0], abs=1e-3),
        pytest.approx(exact[1], abs=1e-3),
    )


def test_the_limit_is_the_quantile_of_random_weights():
    rng = np.random.default_rng(0)
    values = rng.binomial(16, rng.beta(2, 1, 40)) / 16
    means = rng.dirichlet([1] * 41, 400_000) @ [*values, 0.0]
    assert lower_limit(values.tolist()) == pytest.approx(np.quantile(means, 0.025), abs=5e-4)


def test_limits_are_mirror_images_and_do_not_depend_on_the_order():
    values = [0.25, 0.75, 0.25, 1.0, 0.0, 0.5]
    one, other = estimate(values), estimate([1 - value for value in values[::-1]])
    assert (one.low, one.high) == (pytest.approx(1 - other.high), pytest.approx(1 - other.low))
    assert one == estimate(values[::-1])


DIFFICULTIES = {  # of Q questions, with mean p
    "alike": lambda rng, p, count: np.full(count, p),
    "spread": lambda rng, p, count: rng.beta(2 * p, 2 * (1 - p), count),
    "apart": lambda rng, p, count: rng.beta(0.05 * p, 0.05 * (1 - p), count),  # nearly all at 0 or 1
    "some impossible": lambda rng, p, count: np.where(rng.random(count) < 1 - p, 0.0, min(1, p + 0.001)),
}
LONG = bool(os.environ.get("QERL_LONG_TESTS"))
SIZES = [(30, 1), (30, 8), (30, 64), (300, 4)]
MORE_SIZES = [(questions, samples) for questions in (30, 100, 300, 1319) for samples in (1, 2, 4, 16, 64)]


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9, 0.98, 0.998] if LONG else [0.02, 0.5, 0.998])
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_intervals_cover_the_truth(difficulty, p):
    """The nominal coverage is 95%. QERL_LONG_TESTS=1 simulates more sizes, more often."""
    rng = np.random.default_rng(7)
    draw = DIFFICULTIES[difficulty]
    all_questions = draw(rng, p, 1_000_000 if LONG else 200_000)
    for questions, samples in MORE_SIZES if LONG else SIZES:
        for k in {1, max(1, samples // 2)}:
            truth = np.mean(1 - (1 - all_questions) ** k)
            value = np.array([pass_at_k(samples, correct, k) for correct in range(samples + 1)])
            trials = 2000 if LONG else 100
            drawn = [rng.binomial(samples, draw(rng, p, questions)) for _ in range(trials)]
            found = [estimate(value[correct_Q].tolist()) for correct_Q in drawn]
            covered = sum(each.low <= truth <= each.high for each in found) / trials
            # 100 trials of a coverage of 0.95 give less than 0.88 once in 400 times.
            assert covered >= (0.93 if LONG else 0.88), (questions, samples, k)


@pytest.mark.parametrize("questions", [30, 300])
def test_the_interval_of_one_sample_per_question_covers_every_truth(questions):
    """Computed rather than simulated, for accuracies from 0.02 to 0.998."""
    found = [estimate([1.0] * correct + [0.0] * (questions - correct)) for correct in range(questions + 1)]
    for truth in [*np.linspace(0.02, 0.98, 49), 0.99, 0.995, 0.998]:
        chances = log_chances(questions, truth)
        covered = sum(math.exp(c) for c, each in zip(chances, found, strict=True) if each.low <= truth <= each.high)
        assert covered >= 0.95 - 1e-4, truth


def log_chances(count, p):
    """Logarithm of the binomial chance of each number of successes."""
    fixed = math.lgamma(count + 1)
    return [
        fixed - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * math.log(p) + (count - k) * math.log(1 - p)
        for k in range(count + 1)
    ]


@pytest.mark.parametrize("values", [[], [0.5, 1.1], [-0.1]])
def test_what_is_no_proportion_has_no_interval(values):
    with pytest.raises(ValueError, match="no interval"):
        estimate(values)
    with pytest.raises(ValueError, match="no interval"):
        wilson(values[-1] if values else 0.5, len(values))


def test_large_counts_do_not_overflow():
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert math.isfinite(pass_at_k(4096, 100, 2048))


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_equals_drawing_every_subset(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        graded = [True] * correct + [False] * (samples - correct)
        subsets = list(itertools.combinations(graded, k))
        by_hand = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(samples, correct, k) == pytest.approx(by_hand), (samples, correct, k)


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_impossible_draws(samples, correct, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, correct, k)
