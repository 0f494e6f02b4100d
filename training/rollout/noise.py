"""Adaptive quantization noise (AQN, arXiv 2510.11696 section 3.3): Gaussian noise on the norms that falls in stages.

Noise on a norm's weight acts as multiplicative noise on the inputs of every linear that reads the norm's output (on the
columns of its weight (out, in), which the paper writes as rows), so one vector serves q, k and v, and another one gate
and up. Departures from the paper and its code:

1. The vectors are float32 and are added in float32 (`qerl/model/norms.py`): bfloat16 storage would swallow a sigma
   under 1e-3.
2. They depend only on seed and step, so that a resumed run draws the same noise.
3. They are always added to the clean norms of the decoder layers, never on top of earlier noise, and are removed
   exactly after each rollout.
4. By default they act in the rollout only, and the loss corrects for it (`noise.where`). The paper's algorithm 1 uses
   the noisy sampler as the old policy of the clipped ratio; its code does not correct at all.
5. A stage k begins exactly at the first step t with t >= k steps / K, counted from 0. The code counts its steps so that
   each stage begins one step before ours; where its floating-point division (`step // (total_steps / num_intervals)`)
   rounds down, as for stage 5 of 10 in 52 steps, that stage begins one step later than its others. The paper's
   algorithm 1 rounds steps / K down, so that the last steps would fall into a stage K.
6. There is one draw per step, as in algorithm 1 and the code; section 3.3 describes one per forward pass.
7. The final norm gets no noise, as it feeds no quantized linear. The code's filter takes it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qerl.base.philox import derive_seed

if TYPE_CHECKING:
    from qerl.config.noise import NoiseConfig


@dataclass(frozen=True)
class StepNoise:
    """The noise of one step. `vectors` is None if sigma is 0; `std` is measured over all drawn elements."""

    stage: int
    sigma: float
    vectors: dict[str, torch.Tensor] | None
    std: float


class NoiseSchedule:
    """The noise of each step of a run."""

    def __init__(self, config: NoiseConfig, sizes: Mapping[str, int], steps: int, seed: int) -> None:
        """`sizes` maps each block norm's name to the length of its weight; `steps` are the run's optimizer steps."""
        self._config = config
        self._sigmas = stage_sigmas(config) if config.enabled else [0.0]
        self._sizes = dict(sizes)
        self._steps = steps
        self._seed = seed

    def at(self, step: int) -> StepNoise:
        """The noise of optimizer step `step`, counted from 0."""
        stage = stage_of(step, self._steps, len(self._sigmas))
        sigma = self._sigmas[stage]
        if sigma == 0:
            return StepNoise(stage, 0.0, None, 0.0)
        vectors = draw_noise(self._sizes, sigma, self._seed, step)
        return StepNoise(stage, sigma, vectors, torch.cat(list(vectors.values())).std().item())


def stage_sigmas(config: NoiseConfig) -> list[float]:
    """Sigma of stages 0..K-1: stage 0 has no noise, stage 1 has sigma_start.

    The exponent is (k - 1) / (K - 2), as in the reference code, so the last stage has sigma_end. With `schedule: paper`
    it is (k - 1) / (K - 1) as printed (eq. 8, algorithm 1: k = 0..K-1), and the last stage stays above sigma_end.
    Reading equation 8 as K noisy stages after a clean one is `exponential` with `num_stages` K + 1.
    """
    stages = config.num_stages
    span = stages - 1 if config.schedule == "paper" else stages - 2
    shares = [(stage - 1) / span if span else 0.0 for stage in range(1, stages)]
    return [0.0, *(_sigma(config, share) for share in shares)]


def stage_of(step: int, steps: int, num_stages: int) -> int:
    """The stage of step `step` of `steps`. Stages are equally long, and a step past the end is in the last."""
    return min(step * num_stages // steps, num_stages - 1)


def draw_noise(sizes: Mapping[str, int], sigma: float, seed: int, step: int) -> dict[str, torch.Tensor]:
    """A float32 vector (d,) of N(0, sigma^2) for each norm, drawn on the CPU from seed and step alone."""
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "noise"))
    return {name: torch.randn(size, generator=generator) * sigma for name, size in sizes.items()}


def _sigma(config: NoiseConfig, share: float) -> float:
    start, end = config.sigma_start, config.sigma_end
    match config.schedule:
        case "exponential" | "paper":
            return start * (end / start) ** share
        case "linear":
            return start + (end - start) * share
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
        case "logarithmic":  # falls fastest at the start: log(1 + (e - 1) share) goes from 0 to 1
            return start + (end - start) * math.log1p((math.e - 1) * share)
    raise ValueError(config.schedule)
