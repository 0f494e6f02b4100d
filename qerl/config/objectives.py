"""What a run learns from, and what kind of run that is; the sections `sft` and `distill`, with their rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from qerl import formats
from qerl.config.section import Conflict, Conflicts, Section, unread

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


class RunKind(Section):
    """What a run learns from (rewarded samples, a teacher who reads its samples, or given conversations), and what it
    trains: an adapter beside the base, one that each sync packs into the base, or whole weights behind packed ones."""

    learns: Literal["samples", "teacher", "conversations"]
    trains: Literal["adapter", "packed_adapter", "weights"]

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> RunKind:
        """The kind of a recipe's sections, as keys. The sections that decide may be left out, or null."""
        sections = {"sft": "conversations", "distill": "teacher"}
        learns = next((kind for name, kind in sections.items() if recipe.get(name) is not None), "samples")
        trains, qat = "adapter", recipe.get("qat")
        if qat is not None:
            in_adapter = isinstance(qat, Mapping) and qat.get("mode") == "adapter"
            trains = "packed_adapter" if in_adapter else "weights"
        return cls(learns=learns, trains=trains)

    @property
    def tag(self) -> str:
        """What the hub calls such training."""
        return {"samples": "grpo", "teacher": "distillation", "conversations": "sft"}[self.learns]

    @property
    def samples(self) -> bool:
        """Whether an engine samples what the run trains on."""
        return self.learns != "conversations"

    @property
    def packs(self) -> bool:
        """Whether the run trains through the quantizer, so that its result is a packed model."""
        return self.trains != "adapter"

    @property
    def has_adapter(self) -> bool:
        """Whether checkpoints hold an adapter, and not whole weights."""
        return self.trains != "weights"


class SftConfig(Section):
    """Supervised fine-tuning: given conversations are learned, of which the assistant's tokens have a loss."""

    rows_per_step: int = Field(64, ge=1, description="rows in an optimizer step")
    max_tokens: int = Field(
        4096, ge=2, description="tokens of the longest whole conversation; longer rows are left out and counted"
    )


METRIC = "loss"  # what validations of such a run measure, the lower the better; `accuracy`, the default, stands for it


def sft(config: RunConfig) -> Conflicts:
    """Nothing is sampled, so that nothing that is about samples can be asked for."""
    if config.sft is None:
        return
    given = {"sft": "given"}
    why = "rows are given in their order, from one source, and nothing is sampled"
    keys = ("distill", "environment", "data.grader", "data.sources", "data.curriculum")
    yield from unread(config, given, why, *keys, other="sft: null")
    why = "the loss is the mean negative log-likelihood of the assistant's tokens and has no other term"
    yield from unread(config, given, why, "loss.kl_coef", "loss.entropy_coef", "loss.num_iterations")
    if config.validation.metric not in (METRIC, "accuracy"):
        why = f"validations of such a run measure the {METRIC}"
        yield Conflict({"validation.metric": config.validation.metric, **given}, why, f"validation.metric: {METRIC}")


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


def distill(config: RunConfig) -> Conflicts:
    """The loss is the divergence from the teacher alone, and the teacher is another model than the student."""
    if config.distill is None:
        return
    why = "the loss of a distillation is the divergence from the teacher for each completion, and has no other term"
    keys = ("loss.kl_coef", "loss.entropy_coef", "rollout.dynamic_sampling.enabled")
    yield from unread(config, {"distill.beta": config.distill.beta}, why, *keys)
    if config.distill.teacher is None and config.qat is None and not formats.get(config.model.format).quantized:
        yield Conflict(
            {"distill.teacher": None, "model.format": config.model.format},
            "the teacher would be the model that the adapter starts from, and there would be nothing to learn",
            "distill.teacher: another model with the same tokenizer",
        )
