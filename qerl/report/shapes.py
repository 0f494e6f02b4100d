"""The fields that the report needs of each file that it reads."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FiniteFloat, PlainValidator, model_validator

from qerl.base.read_back import Shape
from qerl.report.sampling import PREFIX, SUMMED


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("it should be text")
    return value


def _conversation(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return _text(value)
    return value


Text = Annotated[
    Any, PlainValidator(_text)
]  # unlike str in pydantic, it allows lone surrogates, which models can write
Conversation = Annotated[Any, PlainValidator(_conversation)]  # text, or a list of messages

# If a row has the first metric as a number, it must have the others too.
TOGETHER = {
    "noise/stage": ("noise/sigma",),
    "noise/at_bound": ("noise/sigma",),
    f"{PREFIX}sampled_groups": tuple(PREFIX + name for name in SUMMED),
}


class Metrics(Shape):
    """A line of metrics.jsonl: numbers, or null for a number that was not finite."""

    __pydantic_extra__: dict[str, FiniteFloat | None]
    step: int

    @model_validator(mode="after")
    def _complete(self) -> Metrics:
        metrics = self.__pydantic_extra__
        for key, others in TOGETHER.items():
            for other in others:
                if metrics.get(key) is not None and metrics.get(other) is None:
                    raise ValueError(f"{other} is {'null' if other in metrics else 'missing'}, and {key} is a number")
        return self


class Change(Shape):
    """A prolonged run: up to step `after`, it followed schedules for a total of `was` steps."""

    after: int
    was: int


class About(Shape):
    """run.json."""

    command: list[Text] | None = None
    versions: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None
    changes: list[dict[str, Any]] | None = None
    totals: list[Change] | None = None
    qat: dict[str, Any] | None = None


class Warned(Shape):
    """A line of warnings.jsonl."""

    step: int
    kind: Text
    text: Text


class Sampled(Shape):
    """A line of completions/step-*.jsonl."""

    prompt: Conversation
    completion: Conversation
    rewards: dict[str, float | None] | None = None


class Graded(Shape):
    """A line of an evaluation's completions.jsonl."""

    id: Text
    sample: int
    question: Text
    answer: Text
    completion: Text
    correct: bool
    truncated: bool


class Interval(Shape):
    """A number with the bounds of its 95% interval."""

    value: float
    low: float
    high: float


class Result(Shape):
    """result.json, or the lighteval.json of the other suite."""

    task: Text
    accuracy: Interval | None = None
    scores: dict[str, dict[str, float]] | None = None
    pass_at_k: dict[str, Interval] | None = None
    truncated_share: float | None = None
    no_answer_share: float | None = None
    completions: int | None = None
    completion_tokens: int | None = None


class ComparedResult(Result):
    """The result.json of an evaluation before or after training."""

    accuracy: Interval
    truncated_share: float
    no_answer_share: float
