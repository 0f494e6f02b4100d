"""The section `distill` of a recipe: its keys and their rules.

On-policy distillation: the section `distill`. Importing this loads pydantic and nothing heavier.

The rules of `qerl/config/rules.py` about distillation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from qerl import formats
from qerl.config.conflict import Conflict, Conflicts
from qerl.config.section import Section

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


class DistillConfig(Section):
    """On-policy distillation: the loss is the divergence from a 16-bit teacher, instead of a reward."""

    teacher: str | None = Field(
        None,
        min_length=1,
        description="16-bit model with the student's tokenizer, hub id or folder; null: the student's own 16-bit base",
    )
    beta: float = Field(
        1.0,
        ge=0,
        le=1,
        description="divergence as in TRL: 0 is the forward KL(teacher || student), 1 the reverse KL, 0.5 the JSD",
    )
    temperature: float | None = Field(
        None, gt=0, description="divides the logits of both in the loss; null: rollout.temperature"
    )
    chunk_tokens: int = Field(
        256, ge=1, description="tokens whose logits exist at once: memory and speed, not the result"
    )


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
