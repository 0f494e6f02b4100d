"""The sections `data` and `rewards` of a recipe: rows, where they come from, and what their completions earn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qerl.config.section import Section


class RewardConfig(Section):
    """One reward; the sum of weight * reward is what training maximizes."""

    name: str = Field(
        min_length=1,
        description="registered name, path of a function (`file.py:f`, `package.module:f`), or URL of a reward server",
    )
    weight: float = Field(1.0, description="factor in the sum; 0 only logs the reward")
    args: dict[str, object] = Field(default_factory=dict, description="keyword arguments of the reward")
    timeout_s: float | None = Field(
        None, gt=0, description="seconds that one call of your own function may take; null: 300"
    )


class SourceValidationConfig(Section):
    """Questions of one source that validations ask."""

    source: str | None = Field(
        None, min_length=1, description="hub id, file or folder; null: the rows of the source's task"
    )
    split: str = Field("test", min_length=1, description="split that validation reads")
    columns: dict[str, str] | None = Field(
        None, description="names of its columns; null: with a source those of the rows that train"
    )


class SourceConfig(Section):
    """One of several sources. What it leaves null is as in `data`."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="name in metrics: letters, digits, and _ . - between them"
    )
    weight: float = Field(1.0, gt=0, description="share of the prompts, beside the weights of the others")
    task: str | None = Field(None, min_length=1, description="task by name: prompt and grading; null: data.task")
    source: str | None = Field(
        None, min_length=1, description="hub id, file or folder; null: the rows of the source's task"
    )
    split: str | None = Field(None, min_length=1, description="split that training reads; null: data.split")
    columns: dict[str, str] | None = Field(None, description="names of the source's columns; null: data.columns")
    limit: int | None = Field(None, ge=1, description="use only the first rows, this many; null: all")
    system_prompt: str | None = Field(None, description='system message; null: data.system_prompt; "": none')
    prompt_template: str | None = Field(None, min_length=1, description="user message; null: data.prompt_template")
    grader: str | None = Field(None, min_length=1, description="your own grading of this source; null: data.grader")
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = Field(
        (), description="rewards of this source's completions; none: the recipe's rewards"
    )
    held_out: int = Field(0, ge=0, description="the last rows, this many, are validated and not trained on")
    validation: SourceValidationConfig | None = Field(
        None, description="other rows that validations ask for this source; null: those held out"
    )


class CurriculumConfig(Section):
    """Rows by the share of their latest completions that were right. Rows that were not yet tried come in turn."""

    kind: Literal["solved_share"] = Field("solved_share", description="what decides: the share of right completions")
    low: float = Field(0.0, ge=0, lt=1, description="a row whose share is not above this is hard")
    high: float = Field(1.0, gt=0, le=1, description="a row whose share is not below this is easy")
    hard_share: float = Field(0.2, ge=0, le=1, description="share of the hard rows that an epoch tries again")
    easy_share: float = Field(0.1, ge=0, le=1, description="share of the easy rows that an epoch tries again")
    reward: str | None = Field(
        None,
        min_length=1,
        description="reward that says what is right, from 0.5 on; null: accuracy, or the only reward there is",
    )


class DataConfig(Section):
    """The prompts and the answers they are graded against."""

    task: str = Field(min_length=1, description="task by name: its rows, prompt and grading")
    source: str | None = Field(
        None,
        min_length=1,
        description="hub id (`owner/name`, `owner/name:subset`), file or folder to read instead of the task's own rows",
    )
    split: str = Field("train", min_length=1, description="split that training reads")
    columns: dict[str, str] | None = Field(
        None,
        description="the source's names for question, answer and id, such as {question: problem, answer: solution}",
    )
    system_prompt: str | None = Field("default", description="system message; default: the task's; null: none")
    prompt_template: str = Field(
        "default", min_length=1, description="user message, with {question} in it; default: the task's"
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are dropped, counted and named")
    limit: int | None = Field(None, ge=1, description="use only the first rows, this many; null: all")
    grader: str | None = Field(
        None,
        min_length=1,
        description="your own grading: file.py, file.py:function or package.module:function; null: the task's",
    )
    grader_timeout_s: float = Field(300.0, gt=0, description="seconds that one call of the grader may take")
    keep_unreadable: bool = Field(
        False, description="keep rows whose answer (prose, broken LaTeX) the grader cannot read; else they are dropped"
    )
    chat_template_kwargs: dict[str, object] = Field(
        default_factory=dict, description="switches of the chat template, such as {enable_thinking: false}"
    )
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = Field(
        (), description="several sources in place of one, each with a share of every step"
    )
    curriculum: CurriculumConfig | None = Field(
        None, description="rows are chosen by how many of their completions were right; null: in turn"
    )
