"""Sigma from what it did (`noise.controller`, off by default) instead of from the fixed schedule; not in the paper.

One number is held near a target: the entropy of the sampling policy (noise raises it) or the effective sample size of
the importance weights (noise lowers it). After each rollout

    log sigma <- log sigma + clip(gain * error, +-log 2), then sigma is clipped to [sigma_min, sigma_max]

- entropy: error = (target - entropy) / target.
- ess: error = log((1 - target) / (1 - ess)) / 2. The share that is lost, 1 - ess, grows with sigma^2 while sigma is
  small, so that a gain of 1 would be Newton's step.

The first rollout is clean, so that the mismatch gate can judge, and the second has sigma_start. The next sigma is a
pure function of the log up to here, which every checkpoint holds (trainer_state.json): a resumed run goes on with the
same numbers. A step without the number (no tokens in the loss) leaves sigma as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.config.schema import NoiseConfig

METRICS = {"entropy": "sampling/entropy", "ess": "correction/ess"}
LARGEST_CHANGE = math.log(2)  # of log sigma in one rollout
SMALLEST_LOSS = 1e-12  # of 1 - ess: rounding alone


@dataclass(frozen=True)
class Control:
    """What the controller decided. `error` is the last one seen (0 before the first), `at_bound` that sigma is held."""

    sigma: float
    error: float = 0.0
    at_bound: bool = False


def control(config: NoiseConfig, history: Sequence[Mapping[str, Any]]) -> Control:
    """The next rollout's sigma; `history` has the metrics of each step so far, oldest first."""
    metric = METRICS[config.controller.metric]
    last = next((row for row in reversed(history) if metric in row and "noise/sigma" in row), None)
    if last is None:
        return Control(0.0)
    if last["noise/sigma"] == 0:
        return Control(config.sigma_start)
    error = _error(config, last[metric])
    change = max(-LARGEST_CHANGE, min(LARGEST_CHANGE, config.controller.gain * error))
    wanted = last["noise/sigma"] * math.exp(change)
    sigma = max(config.controller.sigma_min, min(config.controller.sigma_max, wanted))
    return Control(sigma, error, at_bound=sigma != wanted)


def _error(config: NoiseConfig, value: float) -> float:
    """Above 0 where more noise is needed."""
    target = config.controller.target
    if config.controller.metric == "entropy":
        return (target - value) / target
    return math.log((1 - target) / max(1 - value, SMALLEST_LOSS)) / 2
