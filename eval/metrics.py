"""What graded completions say: mean accuracy with a 95% interval, and pass@k.

Pure functions on floats and counts. Questions are the unit of sampling, because the completions of one question are not
independent of each other. Every interval is Wilson's, with the number of trials corrected for that (`effective_count`).
Unlike a normal or bootstrap interval it has an honest width even for 0 of 30 or 30 of 30.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054  # the standard normal's 97.5% quantile

ONE_SAMPLE = "Wilson score, 95%"
MANY_SAMPLES = "Wilson score, 95%, over questions (effective sample size from the spread of the per-question means)"


@dataclass(frozen=True)
class Estimate:
    """A mean of per-question values in [0, 1] and its 95% interval."""

    value: float
    low: float
    high: float


def wilson(proportion: float, count: float) -> tuple[float, float]:
    """Wilson's 95% score interval for a proportion seen in `count` (may be fractional) independent trials.

    Wilson 1927; Brown, Cai, DasGupta 2001 (doi 10.1214/ss/1009213286), equation 4. Raises ValueError without trials.
    """
    if count <= 0 or not 0 <= proportion <= 1:
        raise ValueError(f"no interval for a proportion of {proportion} in {count} trials")
    weight = Z_95**2 / count
    centre = (proportion + weight / 2) / (1 + weight)
    half = Z_95 / (1 + weight) * math.sqrt(proportion * (1 - proportion) / count + weight / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def effective_count(values_Q: Sequence[float], samples: int) -> float:
    """How many independent completions the per-question values are worth: p(1-p) over the variance of their mean.

    Korn and Graubard 1998, as in Franco et al. 2019 (doi 10.1093/jssam/smy019). The result is at least the number of
    questions, which is its value for one sample or equal completions, and at most questions x samples.
    """
    questions = len(values_Q)
    mean = math.fsum(values_Q) / questions
    if samples == 1 or questions == 1 or not 0 < mean < 1:
        return float(questions)
    variance_of_mean = math.fsum((value - mean) ** 2 for value in values_Q) / (questions - 1) / questions
    most = float(questions * samples)
    if variance_of_mean * most <= mean * (1 - mean):
        return most
    return max(float(questions), mean * (1 - mean) / variance_of_mean)


def estimate(values_Q: Sequence[float], samples: int) -> Estimate:
    """Mean over questions with its 95% interval. Each value is of `samples` completions. Raises ValueError for none."""
    if not values_Q:
        raise ValueError("no question, no mean")
    value = min(1.0, math.fsum(values_Q) / len(values_Q))
    low, high = wilson(value, effective_count(values_Q, samples))
    return Estimate(value, low, high)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that k completions, drawn without replacement from `samples`, include one of the `correct` ones.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. (arXiv 2107.03374, equation 1). Raises ValueError if
    k completions cannot be drawn.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples and 0 <= correct <= samples, not {correct} of {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
