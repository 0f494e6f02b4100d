"""What a run learns from, and what kind of run that is; the sections `sft` and `distill`, with their rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from qerl import formats
from qerl.config.section import Conflict, Conflicts, Section

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
    max_tokens: int = Field(4096, ge=2, description="the longest row, in tokens of the whole conversation")
    long_rows: Literal["drop", "truncate"] = Field(
        "drop", description="what becomes of longer rows: left out, or cut at that length; both are counted"
    )


METRIC = "loss"  # what validations of such a run measure, the lower the better
DEFAULT_METRIC = "accuracy"  # of the section validation; here it stands for METRIC


def sft(config: RunConfig) -> Conflicts:
    """Nothing is sampled, so that nothing that is about samples can be asked for."""
    if config.sft is None:
        return
    rows, limit = config.sft.rows_per_step, config.data.limit
    if limit is not None and limit < rows:
        yield Conflict(
            {"data.limit": limit, "sft.rows_per_step": rows},
            "there are fewer rows than a step takes",
            f"data.limit: {rows} or more, or a smaller sft.rows_per_step",
        )
    for key in ("distill", "environment"):
        if getattr(config, key) is not None:
            yield Conflict(
                {key: "given", "sft": "given"},
                "the one is about what the model writes itself, and with the other it is given what to learn",
                f"{key}: null, or sft: null",
            )
    if config.data.grader is not None:
        yield Conflict(
            {"data.grader": config.data.grader, "sft": "given"},
            "nothing is sampled that it could grade",
            "data.grader: null, and give it to `qerl eval` as --grader",
        )
    for key in ("sources", "curriculum"):
        if getattr(config.data, key):
            yield Conflict(
                {f"data.{key}": "given", "sft.rows_per_step": rows},
                "these rows are given in their order, from one source",
                f"data.{key}: {'[]' if key == 'sources' else 'null'}, and data.source",
            )
    loss = config.loss
    for key, off in (("kl_coef", 0.0), ("entropy_coef", 0.0), ("num_iterations", 1)):
        if (value := getattr(loss, key)) != off:
            yield Conflict(
                {f"loss.{key}": value, "sft.rows_per_step": rows},
                "the loss is the mean negative log-likelihood of the assistant's tokens and has no other term",
                f"loss.{key}: {off:g}",
            )
    if config.validation.metric not in (METRIC, DEFAULT_METRIC):
        yield Conflict(
            {"validation.metric": config.validation.metric, "sft.rows_per_step": rows},
            "validations of such a run measure the loss",
            f"validation.metric: {METRIC}",
        )


def without_sft(config: RunConfig) -> Conflicts:
    """The loss of held-out rows is measured only where given rows are learned."""
    if config.sft is None and config.validation.metric == METRIC:
        yield Conflict(
            {"validation.metric": METRIC, "sft": None},
            "validations measure what the model writes",
            "validation.metric: accuracy",
        )


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
