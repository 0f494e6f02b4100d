"""The section `validation` of a recipe: questions that a run answers between its steps (docs/validation.md)."""

from __future__ import annotations

from pydantic import Field

from qerl.config.section import Section


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
        None, min_length=1, description="hub id, file or folder to read instead of the task's own rows"
    )
    split: str = Field("test", min_length=1, description="split that validation reads")
    columns: dict[str, str] | None = Field(
        None, description="names of the source's columns, as data.columns; null: with a source those of data.columns"
    )
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
    keep_best: bool = Field(
        True, description="keep the checkpoint of the best validation, with its adapter in the run's best/"
    )
    stop_after: int | None = Field(
        None, ge=1, description="end the run after this many validations in a row without improvement; null: never"
    )
    min_improvement: float = Field(
        0.0, ge=0, description="what counts as an improvement for stop_after: more than this above the one before"
    )
    target: float | None = Field(None, description="end the run once a validation reaches this; null: none")
