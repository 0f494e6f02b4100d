"""The noise on norms: the section `noise`. Importing this loads pydantic and nothing heavier."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qerl.config.section import Section


class NoiseControllerConfig(Section):
    """Choose sigma so that a measured number reaches a target, instead of by the schedule (sigma_end and the stages are
    then ignored)."""

    metric: Literal["off", "entropy", "ess"] = Field(
        "off",
        description="off: the schedule; entropy of the sampling policy; ess: effective sample size of the weights",
    )
    target: float | None = Field(
        None, gt=0, description="value to hold: nats per token for entropy, share of the tokens (below 1) for ess"
    )
    gain: float = Field(0.5, gt=0, le=4, description="how fast: sigma is multiplied by exp(gain * relative error)")
    sigma_min: float = Field(1e-4, gt=0, description="sigma never falls below this")
    sigma_max: float = Field(0.1, gt=0, description="sigma never rises above this")


class NoiseConfig(Section):
    """Adaptive quantization noise: Gaussian noise on the norms, smaller from stage to stage (stage 0: none)."""

    enabled: bool = Field(True, description="add the noise")
    sigma_start: float = Field(1e-2, gt=0, description="standard deviation in the first noisy stage")
    sigma_end: float = Field(5e-4, ge=0, description="standard deviation in the last stage")
    num_stages: int = Field(10, ge=2, description="equal intervals of the run's steps")
    schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = Field(
        "exponential", description="how sigma goes from start to end"
    )
    indexing: Literal["code", "paper"] = Field(
        "code",
        description="stage k of K is (k-1)/(K-2) of the way (code), or (k-1)/(K-1) (paper: ends above sigma_end)",
    )
    where: Literal["rollout", "both"] = Field(
        "rollout", description="noise while sampling only, or in the trainer's forward passes as well"
    )
    controller: NoiseControllerConfig = Field(
        default_factory=NoiseControllerConfig, description="sigma that follows a target instead of the schedule"
    )
