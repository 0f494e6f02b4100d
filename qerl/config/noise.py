"""The section `noise` of a recipe: its keys and their rules.

The noise on norms: the section `noise`. Importing this loads pydantic and nothing heavier.

The rules of `qerl/config/rules.py` about the noise: its schedule, and the controller that may replace it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from qerl.config.conflict import Conflict, Conflicts
from qerl.config.section import Section

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


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


def noise(config: RunConfig) -> Conflicts:
    """Noise acts where it is told to, and its schedule is possible."""
    this = config.noise
    if this.where == "both" and config.loss.kl_coef > 0:
        yield Conflict(
            {"noise.where": "both", "loss.kl_coef": config.loss.kl_coef},
            "the reference policy would be noisy too, and the KL divergence would not be the one from the base",
            "noise.where: rollout, or loss.kl_coef: 0",
        )
    if not this.enabled and this.where == "both":
        yield Conflict(
            {"noise.where": "both", "noise.enabled": False},
            "there is no noise",
            "noise.enabled: true, or noise.where: rollout",
        )
    if this.controller.metric == "off":
        yield from _schedule(config)


def _schedule(config: RunConfig) -> Conflicts:
    """The schedule falls, its formula is defined, and each stage has a step."""
    this, steps = config.noise, config.run.steps
    if this.sigma_end > this.sigma_start:
        yield Conflict(
            {"noise.sigma_end": this.sigma_end, "noise.sigma_start": this.sigma_start},
            "noise falls over the run",
            f"a sigma_end of at most {this.sigma_start:g}",
        )
    if not this.enabled:
        return
    if this.schedule == "exponential" and this.sigma_end == 0:
        yield Conflict(
            {"noise.sigma_end": 0, "noise.schedule": "exponential"},
            "an exponential never reaches 0",
            "noise.sigma_end: 5e-4, or noise.schedule: linear",
        )
    if this.indexing == "code" and this.num_stages < 3:
        yield Conflict(
            {"noise.num_stages": this.num_stages, "noise.indexing": "code"},
            "(k-1)/(K-2) needs K of at least 3 (stage 0 has no noise, one has sigma_start, one sigma_end)",
            "noise.num_stages: 3 or more, or noise.indexing: paper",
        )
    if steps < this.num_stages:
        yield Conflict(
            {"run.steps": steps, "noise.num_stages": this.num_stages},
            "some stages would have no step",
            f"run.steps: {this.num_stages} or more, fewer stages, or noise.enabled: false",
        )


def noise_controller(config: RunConfig) -> Conflicts:
    """The controller has a target, noise to reach it with, and room to move."""
    this, noise = config.noise.controller, config.noise
    if this.metric == "off":
        if this.target is not None:
            yield Conflict(
                {"noise.controller.target": this.target, "noise.controller.metric": "off"},
                "nothing would read the target",
                "noise.controller.metric: entropy or ess, or leave the target out",
            )
        return
    if not noise.enabled:
        yield Conflict(
            {"noise.controller.metric": this.metric, "noise.enabled": False},
            "there is no noise to control",
            "noise.enabled: true, or noise.controller.metric: off",
        )
    yield from _target(config)
    yield from _bounds(config)
    if config.run.steps <= 2 * config.loss.num_iterations:
        steps = 2 * config.loss.num_iterations + 1
        yield Conflict(
            {"noise.controller.metric": this.metric, "run.steps": config.run.steps},
            "the first rollout is clean and the second has sigma_start, so that none is left to control",
            f"run.steps: {steps} or more, or noise.controller.metric: off",
        )


def _target(config: RunConfig) -> Conflicts:
    this = config.noise.controller
    values: dict[str, object] = {"noise.controller.metric": this.metric}
    if this.target is None:
        example = "0.5 (nats per token)" if this.metric == "entropy" else "0.98 (share of the tokens)"
        yield Conflict(
            values | {"noise.controller.target": None},
            "it has no target",
            f"noise.controller.target, such as {example}",
        )
    elif this.metric == "ess" and this.target >= 1:
        yield Conflict(
            values | {"noise.controller.target": this.target},
            "an effective sample size is a share of the tokens, and 1 is reached without noise only",
            "a noise.controller.target below 1, such as 0.98",
        )
    if this.metric == "ess" and config.noise.where == "both":
        yield Conflict(
            values | {"noise.where": "both"},
            "sampler and trainer then have the same noise, and the effective sample size is 1 whatever sigma is",
            "noise.where: rollout, or noise.controller.metric: entropy",
        )


def _bounds(config: RunConfig) -> Conflicts:
    this, begin = config.noise.controller, config.noise.sigma_start
    if this.sigma_min >= this.sigma_max:
        yield Conflict(
            {"noise.controller.sigma_min": this.sigma_min, "noise.controller.sigma_max": this.sigma_max},
            "no sigma lies between them",
            f"noise.controller.sigma_min: {this.sigma_max / 10:g}, or a larger sigma_max",
        )
    for key, bound in (("sigma_min", max(begin, this.sigma_min)), ("sigma_max", min(begin, this.sigma_max))):
        if bound != begin:
            yield Conflict(
                {f"noise.controller.{key}": bound, "noise.sigma_start": begin},
                "sigma begins at sigma_start, which has to lie between sigma_min and sigma_max",
                f"noise.sigma_start: {bound:g}, or another noise.controller.{key}",
            )
