"""The section `noise` of a recipe: the noise on norms, with the rules for its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from qerl.config.section import Conflict, Conflicts, Section, unread

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


class NoiseConfig(Section):
    """Adaptive quantization noise: Gaussian noise on the norms, smaller from stage to stage (stage 0: none)."""

    enabled: bool = Field(True, description="add the noise")
    sigma_start: float = Field(1e-2, gt=0, description="standard deviation in the first noisy stage")
    sigma_end: float = Field(5e-4, ge=0, description="standard deviation in the last stage")
    num_stages: int = Field(10, ge=2, description="equal intervals of the run's steps")
    schedule: Literal["exponential", "linear", "cosine", "logarithmic", "paper"] = Field(
        "exponential",
        description="how sigma goes from start to end, of which stage k of K is (k-1)/(K-2) of the way; paper: "
        "exponential and (k-1)/(K-1), which ends above sigma_end",
    )
    where: Literal["rollout", "both"] = Field(
        "rollout", description="noise while sampling only, or in the trainer's forward passes as well"
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
    if not this.enabled:
        yield from unread(config, {"noise.enabled": False}, "there is no noise", "noise.where")
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
    if this.schedule in ("exponential", "paper") and this.sigma_end == 0:
        yield Conflict(
            {"noise.sigma_end": 0, "noise.schedule": this.schedule},
            "an exponential never reaches 0",
            "noise.sigma_end: 5e-4, or noise.schedule: linear",
        )
    if this.schedule != "paper" and this.num_stages < 3:
        yield Conflict(
            {"noise.num_stages": this.num_stages, "noise.schedule": this.schedule},
            "(k-1)/(K-2) needs K of at least 3 (stage 0 has no noise, one has sigma_start, one sigma_end)",
            "noise.num_stages: 3 or more, or noise.schedule: paper",
        )
    if steps < this.num_stages:
        yield Conflict(
            {"run.steps": steps, "noise.num_stages": this.num_stages},
            "some stages would have no step",
            f"run.steps: {this.num_stages} or more, fewer stages, or noise.enabled: false",
        )
