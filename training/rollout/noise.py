"""Adaptive quantization noise (AQN, arXiv 2510.11696 section 3.3): Gaussian noise in the norms, smaller by stages.

Noise in a norm's weight is row-multiplicative noise on every linear that reads the norm's output, so one vector serves
q, k and v, and one gate and up. Departures from the paper and its code:

1. The vectors are float32 and act in float32 (`qerl/layers/norms.py`); stored in bfloat16, a sigma under 1e-3 is
   swallowed.
2. They are a pure function of (seed, step): a resumed run draws the same noise.
3. They are added to the clean norms of the decoder layers each time, never cumulatively, and taken away bit-exactly.
4. By default they act in the rollout only, and the loss corrects for it (`noise.where`). The paper's algorithm 1 takes
   the noisy sampler for the old policy of the clipped ratio; its code corrects for nothing.
5. A stage begins at the first step t with t >= k steps / K, exactly. The code divides in floating point
   (`step // (total_steps / num_intervals)`) and begins some stages one step late: stage 5 of 10 at step 27 of 52. The
   paper's algorithm 1 rounds steps / K down, so that the last steps would fall into a stage K.
6. One draw for a step, as in algorithm 1 and the code; section 3.3 speaks of one for each forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from training.rollout.noise_controller import control

if TYPE_CHECKING:
    from qerl.config.schema import NoiseConfig


@dataclass(frozen=True)
class StepNoise:
    """The noise of one step. `vectors` is None where sigma is 0; `std` is measured over all drawn elements.

    Under a controller stage 0 is the clean rollout and stage 1 all others, and `controlled` has its metrics.
    """

    stage: int
    sigma: float
    vectors: dict[str, torch.Tensor] | None
    std: float
    controlled: dict[str, float] = field(default_factory=dict)


class NoiseSchedule:
    """Which noise acts at which step."""

    def __init__(self, config: NoiseConfig, sizes: Mapping[str, int], steps: int, seed: int) -> None:
        """`sizes` gives the length of each block norm's weight by its name; `steps` the run's optimizer steps."""
        self._config = config
        self._sigmas = stage_sigmas(config) if config.enabled else [0.0]
        self._sizes = dict(sizes)
        self._steps = steps
        self._seed = seed

    def at(self, step: int, history: Sequence[Mapping[str, Any]] = ()) -> StepNoise:
        """The noise of optimizer step `step` (0 is the first); a controller reads the steps' metrics in `history`."""
        if self._config.enabled and self._config.controller.metric != "off":
            decided = control(self._config, history)
            metrics = {"noise/control_error": decided.error, "noise/at_bound": float(decided.at_bound)}
            return self._draw(step, int(decided.sigma > 0), decided.sigma, metrics)
        stage = stage_of(step, self._steps, len(self._sigmas))
        return self._draw(step, stage, self._sigmas[stage], {})

    def _draw(self, step: int, stage: int, sigma: float, controlled: dict[str, float]) -> StepNoise:
        if sigma == 0:
            return StepNoise(stage, 0.0, None, 0.0, controlled)
        vectors = draw_noise(self._sizes, sigma, self._seed, step)
        return StepNoise(stage, sigma, vectors, torch.cat(list(vectors.values())).std().item(), controlled)


def stage_sigmas(config: NoiseConfig) -> list[float]:
    """Sigma of stages 0..K-1: stage 0 has none, stage 1 sigma_start.

    With `indexing: code` the last stage has sigma_end (exponent (k - 1) / (K - 2), as the reference code counts); with
    `paper` the exponent is (k - 1) / (K - 1) as printed (eq. 8, algorithm 1: k = 0..K-1), so that the last stage stays
    above sigma_end. Equation 8 with K noisy stages after the clean one is `code` with `num_stages` K + 1.
    """
    stages = config.num_stages
    span = stages - 2 if config.indexing == "code" else stages - 1
    shares = [(stage - 1) / span if span else 0.0 for stage in range(1, stages)]
    return [0.0, *(_sigma(config, share) for share in shares)]


def stage_of(step: int, steps: int, num_stages: int) -> int:
    """The stage that optimizer step `step` of `steps` falls into: equal intervals, steps past the end in the last."""
    return min(step * num_stages // steps, num_stages - 1)


def draw_noise(sizes: Mapping[str, int], sigma: float, seed: int, step: int) -> dict[str, torch.Tensor]:
    """One float32 vector (d,) of N(0, sigma^2) for each norm, from (seed, step) alone, drawn on the CPU."""
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "noise"))
    return {name: torch.randn(size, generator=generator) * sigma for name, size in sizes.items()}


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """A 63-bit seed for one purpose at one step, so that no two uses share a stream."""
    import hashlib

    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _sigma(config: NoiseConfig, share: float) -> float:
    start, end = config.sigma_start, config.sigma_end
    match config.schedule:
        case "exponential":
            return start * (end / start) ** share
        case "linear":
            return start + (end - start) * share
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
        case "logarithmic":  # falls fastest at first: log(1 + (e - 1) share) goes from 0 to 1
            return start + (end - start) * math.log1p((math.e - 1) * share)
    raise ValueError(config.schedule)
