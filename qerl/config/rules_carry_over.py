"""The rule of `qerl/config/rules.py` about completions that go on in later steps: what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.config.conflict import Conflict, Conflicts

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


def carry_over(config: RunConfig) -> Conflicts:
    """A step's groups are those that have ended, and what older policies drew is corrected for."""
    rollout, steps = config.rollout, config.rollout.carry_over
    if not steps:
        return
    asked = {"rollout.carry_over": steps}
    if rollout.dynamic_sampling.enabled:
        yield Conflict(
            asked | {"rollout.dynamic_sampling.enabled": True},
            "groups without a signal are replaced by rollouts that wait for their longest completion",
            "rollout.dynamic_sampling.enabled: false, or rollout.carry_over: 0",
        )
    for key in ("sources", "curriculum"):
        if value := getattr(config.data, key):
            yield Conflict(
                asked | {f"data.{key}": [each.name for each in value] if key == "sources" else value.kind},
                "a step then trains on the groups that have ended, whichever rows were its turn",
                f"rollout.carry_over: 0, or leave data.{key} out",
            )
    if config.environment is not None:
        yield Conflict(
            asked | {"environment": config.environment.name or "of tools"},
            "an episode cannot be left and gone on with, since its environment would have to wait as well",
            "rollout.carry_over: 0",
        )
    if rollout.batch_size is not None:
        yield Conflict(
            asked | {"rollout.batch_size": rollout.batch_size},
            "all completions in progress are sampled at once, so that the next begin where some end",
            "rollout.batch_size: null, or fewer rollout.prompts_per_step",
        )
    if config.loss.correction.mode == "off" and config.distill is None:
        yield Conflict(
            asked | {"loss.correction.mode": "off"},
            "tokens that an older policy drew would be taken for the present one's",
            "loss.correction.mode: token_truncate, or rollout.carry_over: 0",
        )
