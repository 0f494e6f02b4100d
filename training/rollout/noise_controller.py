"""Choose sigma by its measured effect instead of by a fixed schedule (`noise.controller`, off by default).

This is not in the paper. The controller holds one number near a target: the entropy of the sampling policy, which noise
raises, or the effective sample size of the importance weights, which noise lowers. After each rollout

    log sigma <- log sigma + clip(gain * error, +-log 2), then sigma is clipped to [sigma_min, sigma_max]

- entropy: error = (target - entropy) / target.
- ess: error = log((1 - target) / (1 - ess)) / 2. The lost share 1 - ess grows with sigma^2 while sigma is small, so a
  gain of 1 would be Newton's step.

The first rollout is clean, so that the mismatch gate can judge it, and the second has sigma_start. The next sigma
depends only on the log so far, which every checkpoint holds (trainer_state.json), so a resumed run continues with the
same numbers. A step that lacks the number, because it had no tokens in the loss, leaves sigma unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.config.noise import NoiseConfig

METRICS = {"entropy": "sampling/entropy", "ess": "correction/ess"}
LARGEST_CHANGE = math.log(2)  # of log sigma per rollout
SMALLEST_LOSS = 1e-12  # of 1 - ess; what is below is rounding


@dataclass(frozen=True)
class Control:
    """What the controller decided: sigma, the latest error (0 before the first), whether sigma is at a bound."""

    sigma: float
    error: float = 0.0
    at_bound: bool = False


def control(config: NoiseConfig, history: Sequence[Mapping[str, Any]]) -> Control:
    """The sigma of the next rollout. `history` has the metrics of each step so far, oldest first."""
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
    """The controller's error; it is above 0 if more noise is needed."""
    target = config.controller.target
    if config.controller.metric == "entropy":
        return (target - value) / target
    return math.log((1 - target) / max(1 - value, SMALLEST_LOSS)) / 2
