"""What a run's files say: the fields that the report needs of each, and what dynamic sampling cost in all steps.

Only metrics.jsonl is required; everything else is shown if it exists.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import FiniteFloat, PlainValidator, model_validator

from qerl.base.errors import DataError
from qerl.base.files import no_folder
from qerl.base.read_back import OF_EVALUATION, Row, Shape, read_object, read_rows
from qerl.checkpoint.folder import adapter_damage, adapters_of_run
from qerl.config.objectives import RunKind
from qerl.config.recipe import read_config

PREFIX = "dynamic_sampling/"
SUMMED = ("extra_rollouts", "sampled_groups", "discarded_groups", "discarded_tokens", "filled_groups")


def sampling_text(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What dynamic sampling did and what it cost, in a sentence; None for a run without it."""
    steps = [row for row in rows if row.get(PREFIX + "sampled_groups") is not None]
    if not steps:
        return None
    rollouts, sampled, discarded, tokens, filled = (sum(row[PREFIX + name] for row in steps) for name in SUMMED)
    extra_s = sum(row.get("time/extra_rollouts_s") or 0.0 for row in steps)
    share = extra_s / (sum(row.get("time/step_s") or 0.0 for row in rows) or 1.0)
    trained = sampled - discarded
    return (
        f"{trained - filled:.0f} of the {trained:.0f} groups trained on had a signal; {sampled:.0f} were sampled and "
        f"{discarded:.0f} discarded ({tokens:,.0f} tokens), in {rollouts:.0f} extra rollouts of {extra_s:.0f} s, "
        f"{share:.0%} of the run's time"
    )


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("it should be text")
    return value


def _conversation(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return _text(value)
    return value


# Unlike str in pydantic, Text allows lone surrogates, which models can write.
Text = Annotated[Any, PlainValidator(_text)]
Conversation = Annotated[Any, PlainValidator(_conversation)]  # text, or a list of messages

# If a row has the first metric as a number, it must have the others too.
TOGETHER = {
    "noise/stage": ("noise/sigma",),
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
    kind: RunKind | None = None
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


logger = logging.getLogger(__name__)

OF_RUN = "put back the file as the run wrote it, or delete that line"


@dataclass(frozen=True)
class Evaluation:
    """A finished `qerl eval`: its result.json or lighteval.json, and its graded completions."""

    folder: Path
    name: str  # distinguishes it from the other evaluations shown
    result: dict[str, Any]
    rows: list[Row] = field(repr=False)


@dataclass(frozen=True)
class Run:
    """What a run wrote: in `rows` the metrics of each step, in `samples` the logged completions with their steps.

    `validations` are the rows with one, step 0 included, which was made before the first step.
    """

    folder: Path
    name: str  # distinguishes it from the other runs shown
    rows: list[Row] = field(repr=False)
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    config_text: str = field(default="", repr=False)
    about: dict[str, Any] = field(default_factory=dict)  # run.json
    samples: list[Row] = field(default_factory=list, repr=False)
    evaluations: list[Evaluation] = field(default_factory=list, repr=False)
    warnings: list[Row] = field(default_factory=list, repr=False)  # step, kind and text, in order
    validations: list[Row] = field(default_factory=list, repr=False)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read each run once. If two folders have the same name, all runs are named by their paths.

    Raises what `read_run` raises.
    """
    different = list({folder.resolve(): folder for folder in folders}.values())
    names = [folder.resolve().name for folder in different]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in different]
    return [read_run(folder, name) for folder, name in zip(different, names, strict=True)]


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read one run. Raises DataError if it has no metrics, or has a file that is not what a run writes."""
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(_no_run(folder))
    logged = read_rows(folder / "metrics.jsonl", Metrics, OF_RUN)
    rows = [row for row in logged if row["step"] > 0]  # line 0 is the validation before the first step
    if not rows:
        raise DataError(f"{folder} has no steps in metrics.jsonl: give the directory of a run that has them")
    about, warnings = folder / "run.json", folder / "warnings.jsonl"
    config, config_text = _config(folder / "config.yaml")
    damaged = {path.relative_to(folder): adapter_damage(path) for path in adapters_of_run(folder)}
    found = read_rows(warnings, Warned, OF_RUN) if warnings.exists() else []
    found += [
        {"step": rows[-1]["step"], "kind": f"damaged {path}", "text": f"{path} is damaged: {damage}"}
        for path, damage in damaged.items()
        if damage
    ]
    return Run(
        folder,
        name or folder.resolve().name,
        rows,
        config,
        config_text,
        read_object(about, About, "put back what the run wrote, or delete it") if about.exists() else {},
        _samples(folder),
        [read_evaluation(path) for path in sorted(folder.glob("eval/*")) if _result_file(path).exists()],
        found,
        [row for row in logged if any(row.get(f"validation/{name}") is not None for name in ("reward", "loss"))],
    )


def read_evaluation(folder: Path, shape: type[Result] = Result) -> Evaluation:
    """Read one evaluation. One by lighteval has no completions. Raises DataError if it is not a finished evaluation."""
    completions = folder / "completions.jsonl"
    rows = read_rows(completions, Graded, OF_EVALUATION) if completions.exists() else []
    result = read_object(_result_file(folder), shape, OF_EVALUATION)
    return Evaluation(folder, folder.resolve().name, result, rows)


def _no_run(folder: Path) -> str:
    if _result_file(folder).is_file():
        return f"{folder} is an evaluation: give the run, and evaluations with --before and --after"
    if (folder / "config.yaml").is_file():
        return f"{folder} has no metrics.jsonl: put it back, or give the directory of a run that has begun"
    what = f"{folder} is not a run: it has no metrics.jsonl" if folder.exists() else no_folder(str(folder))
    return f"{what}; give the directory that `qerl train` printed"


def completions_step(path: Path) -> int | None:
    """The step whose completions a file of a run holds; None for a file that no run wrote, such as a copy."""
    named = re.fullmatch(r"step-([0-9]{1,12})\.jsonl", path.name)
    return int(named[1]) if named else None


def _result_file(folder: Path) -> Path:
    """The file with an evaluation's numbers: our own result.json, or what `--suite lighteval` wrote."""
    suite = folder / "lighteval.json"
    return suite if suite.exists() else folder / "result.json"


def _config(path: Path) -> tuple[dict[str, Any], str]:
    """The configuration, and the text of its file."""
    if not path.exists():
        return {}, ""
    try:
        return read_config(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): put back the file that the run wrote") from error


def _samples(folder: Path) -> list[Row]:
    rows = []
    for path in sorted(folder.glob("completions/step-*.jsonl")):
        if (step := completions_step(path)) is None:
            logger.warning("%s is passed over: no run writes a file of that name", path)
            continue
        rows += [{**row, "step": step} for row in read_rows(path, Sampled, OF_RUN)]
    return rows


def latest_warnings(run: Run) -> list[tuple[str, str]]:
    """For each kind of warning its steps and its latest text, in the order in which the kinds first occurred."""
    by_kind: dict[str, list[dict]] = {}
    for row in run.warnings:
        by_kind.setdefault(row["kind"], []).append(row)
    return [(", ".join(str(row["step"]) for row in rows), str(rows[-1]["text"])) for rows in by_kind.values()]
