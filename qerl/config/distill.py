"""On-policy distillation: the section `distill`. Importing this loads pydantic and nothing heavier."""

from __future__ import annotations

from pydantic import Field

from qerl.config.section import Section


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
