"""The section `sft` of a recipe: its keys and their rules.

Supervised fine-tuning: the section `sft`. Importing this loads pydantic and nothing heavier.

The rules of `qerl/config/rules.py` about supervised fine-tuning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from qerl.config.conflict import Conflict, Conflicts
from qerl.config.section import Section

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


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
