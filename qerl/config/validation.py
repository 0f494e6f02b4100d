"""The section `validation` of a recipe: questions that a run answers between its steps (docs/validation.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from qerl.config.data import known_task
from qerl.config.names import MIN_TEMPERATURE
from qerl.config.section import Conflict, Conflicts, Section, unread

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


class ValidationConfig(Section):
    """Questions that the run answers between its steps with the policy as it is then, and what follows from it."""

    every: int | None = Field(
        None, ge=1, description="steps between validations; the last step is always validated; null: no validation"
    )
    at_start: bool = Field(True, description="validate before the first step too")
    task: str | None = Field(
        None, min_length=1, description="task by name: its rows and grading; null: that of data.task"
    )
    source: str | None = Field(
        None,
        min_length=1,
        description="hub id, file or folder to read instead of the task's own rows, with data.columns",
    )
    split: str = Field("test", min_length=1, description="split that validation reads")
    limit: int | None = Field(200, ge=1, description="use only the first rows, this many; null: all")
    samples: int = Field(1, ge=1, description="completions per question")
    temperature: float = Field(0.0, ge=0, description="divides the logits; 0: greedy")
    max_new_tokens: int | None = Field(
        None, ge=1, description="a completion is truncated here; null: rollout.max_new_tokens"
    )
    metric: str = Field(
        "accuracy",
        min_length=1,
        description="what decides which checkpoint is best and when to stop, the higher the better: accuracy, reward, "
        "one reward as rewards/NAME, or of one source sources/NAME/accuracy",
    )
    stop_after: int | None = Field(
        None, ge=1, description="end the run after this many validations in a row without improvement; null: never"
    )


def validation(config: RunConfig) -> Conflicts:
    """Whoever asks for something that validations decide has validations, at steps that can be saved."""
    this = config.validation
    if this.every is None:
        why = "without validations nothing would end the run"
        given = {"validation.every": None}
        yield from unread(config, given, why, "validation.stop_after", other="validation.every: 50")
        return
    if this.task is not None:
        yield from known_task("validation.task", this.task)
    yield from _sampling(config)
    yield from _verdict(config)


def _sampling(config: RunConfig) -> Conflicts:
    this = config.validation
    if 0 < this.temperature < MIN_TEMPERATURE:
        yield Conflict(
            {"validation.temperature": this.temperature},
            f"vllm samples at {MIN_TEMPERATURE} instead",
            f"validation.temperature: 0 (greedy), or {MIN_TEMPERATURE} or more",
        )
    if this.samples > 1 and this.temperature == 0:
        yield Conflict(
            {"validation.samples": this.samples, "validation.temperature": 0},
            "greedy completions of one question are all the same",
            "validation.temperature: 0.6, or validation.samples: 1",
        )


def _verdict(config: RunConfig) -> Conflicts:
    this = config.validation
    of_sources = [f"sources/{each.name}/{what}" for each in config.data.sources for what in ("accuracy", "reward")]
    losses = () if config.sft is None else ("loss",)
    if this.metric not in ("accuracy", "reward", *losses, *of_sources) and not this.metric.startswith("rewards/"):
        others = f", or of one source {', '.join(of_sources)}" if of_sources else ""
        yield Conflict(
            {"validation.metric": this.metric},
            "no validation gives a value of that name that is the better the higher it is",
            f"validation.metric: accuracy, reward, or one of the rewards as rewards/NAME{others}",
        )
