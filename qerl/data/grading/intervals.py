"""What graded completions say: mean accuracy with a 95% interval, and pass@k.

Pure functions on floats and counts. Questions are the unit of sampling, because the completions of one question are not
independent of each other. A question's value (its share of right completions, or its pass@k) is some number in [0, 1],
and the interval is for the mean of such numbers, whatever their distribution: `lower_limit`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054  # the standard normal's 97.5% quantile

ONE_SAMPLE = "Clopper-Pearson, 95%"
MANY_SAMPLES = "Gaffke's bounds over questions, 95%"


@dataclass(frozen=True)
class Estimate:
    """A mean of per-question values in [0, 1] and its 95% interval."""

    value: float
    low: float
    high: float


def estimate(values_Q: Sequence[float]) -> Estimate:
    """Mean over questions with its 95% interval, of values in [0, 1]. Raises ValueError for others, or for none."""
    if not values_Q or not 0 <= min(values_Q) <= max(values_Q) <= 1:
        raise ValueError(f"no interval for the mean of {len(values_Q)} values: one or more, from 0 to 1, are needed")
    value = min(1.0, math.fsum(values_Q) / len(values_Q))
    return Estimate(value, lower_limit(values_Q), 1 - lower_limit([1 - value for value in values_Q]))


def lower_limit(values_Q: Sequence[float]) -> float:
    """The 97.5% lower confidence limit of the mean of independent values in [0, 1], of which these were drawn.

    It is the 2.5% quantile of the values' mean under random weights, uniform on the simplex (a Bayesian bootstrap), to
    which the least possible value, 0, has been added: it stands for what was not drawn. Gaffke 2005; Learned-Miller and
    Thomas (arXiv 1905.06208), whose simulations never fell short of the nominal coverage. For values of 0 and 1 it is
    Clopper and Pearson's limit. It is wide where few questions were asked and all of them agree, because one bad
    question in twenty may not have been among them.

    The quantile comes from a saddlepoint approximation to weighted sums of gamma variables (Lugannani and Rice 1980 in
    the form r*, Butler 2007, section 2.3), which is within 0.001 of the exact limit from 20 questions on.
    """
    if not (largest := max(values_Q)):
        return 0.0
    counts = Counter(values_Q)
    counts[0.0] += 1
    low, high = -9.0, 40.0  # the tilt's logarithm, in units of the largest value: from next to the mean to next to 0
    for _ in range(32):
        tilt = (low + high) / 2
        limit, deviate = _tilted(counts, math.exp(tilt) / largest)
        low, high = (tilt, high) if deviate > -Z_95 else (low, tilt)
    return limit


def _tilted(counts: Counter[float], tilt: float) -> tuple[float, float]:
    """The limit at which the saddlepoint is `tilt` > 0, and the normal deviate of the chance of a mean below it.

    It is the chance of sum_i g_i (x_i - limit) <= 0, with g_i ~ Gamma(count_i) of rate 1.
    """
    weights = {value: count / (1 + tilt * value) for value, count in counts.items()}
    limit = math.fsum(value * weight for value, weight in weights.items()) / math.fsum(weights.values())
    scale = 1 + tilt * limit
    cumulant = -math.fsum(count * math.log((1 + tilt * value) / scale) for value, count in counts.items())
    curvature = math.fsum(weight**2 / counts[value] * (value - limit) ** 2 for value, weight in weights.items())
    signed_root, distance = -math.sqrt(max(0.0, -2 * cumulant)), -tilt * math.sqrt(curvature)
    return limit, signed_root + math.log(distance / signed_root) / signed_root


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that k completions, drawn without replacement from `samples`, include one of the `correct` ones.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. (arXiv 2107.03374, equation 1). Raises ValueError if
    k completions cannot be drawn.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples and 0 <= correct <= samples, not {correct} of {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


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
