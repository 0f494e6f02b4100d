"""The rules of `qerl/config/rules.py` about distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl import formats
from qerl.config.conflict import Conflict, Conflicts

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


def distill(config: RunConfig) -> Conflicts:
    """The loss is the divergence from the teacher alone, and the teacher is another model than the student."""
    if config.distill is None:
        return
    for key in ("kl_coef", "entropy_coef"):
        if value := getattr(config.loss, key):
            yield Conflict(
                {f"loss.{key}": value, "distill.beta": config.distill.beta},
                "the loss of a distillation is the divergence from the teacher and has no other term",
                f"loss.{key}: 0",
            )
    if config.rollout.dynamic_sampling.enabled:
        yield Conflict(
            {"rollout.dynamic_sampling.enabled": True, "distill.beta": config.distill.beta},
            "it throws away groups whose rewards are equal, and a teacher has something to say about each completion",
            "rollout.dynamic_sampling.enabled: false",
        )
    if config.distill.teacher is None and config.qat is None and not formats.get(config.model.format).quantized:
        yield Conflict(
            {"distill.teacher": None, "model.format": config.model.format},
            "the teacher would be the model that the adapter starts from, and there would be nothing to learn",
            "distill.teacher: another model with the same tokenizer",
        )
