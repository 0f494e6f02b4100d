"""What the commands do, from a script or a notebook: train, fine-tune, evaluate, quantize, merge and export.

Each function takes the command's options as arguments, and returns a value: a run, a result, or a report with the
folder that was written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from qerl.api.arguments import (
    Function,
    Functions,
    as_before,
    brings_prompts,
    check_keywords,
    environment_keys,
    environment_name,
    given_environments,
    grader_of,
    is_path,
    is_sources,
    listed_tools,
    model_name,
    one_at_a_time,
    plain_rows,
    rewards_of,
    sources_of,
    spelled_out,
    typed,
)
from qerl.api.arguments import GivenRows as Rows
from qerl.api.recipe import Recipe
from qerl.api.run import Run
from qerl.base.errors import ConfigError
from qerl.base.program import PYTHON, given
from qerl.base.program import ROWS as ROWS_of_given
from qerl.cli.train import DistillOptions, TrainOptions, begin, check_new, find_resumed, go_on
from qerl.data.tasks import get_task

if TYPE_CHECKING:
    from eval.compare import Comparison
    from eval.result import EvalResult
    from quantize.export.report import ExportReport, MergeReport
    from quantize.report import QuantizeReport
    from training.run import TrainResult


ROWS = f"{PYTHON}:data"  # the name of rows that the program gave
NOT_HERE = ("suite", "suite_tasks", "run", "checkpoints")  # of the command alone


@one_at_a_time
def evaluate(
    task: str,
    model: str | os.PathLike | Run | None = None,
    *,
    data: str | os.PathLike | Rows | None = None,
    grader: str | Function | None = None,
    environment: str | Function | None = None,
    tools: str | Function | Sequence[str | Function] = (),
    gpu: int | None = None,
    **settings: Any,
) -> EvalResult:
    """Measure a model on a task: `evaluate("gsm8k", run).summary.accuracy` has value, low and high.

    `settings` are options of `qerl eval` (docs/commands.md), such as limit, samples, sampled, max_new_tokens and out.
    All completions are saved, and the same call reads a finished evaluation, or continues one that was interrupted.
    """
    from eval.settings import EvalSettings

    known = [each.name for each in fields(EvalSettings) if each.name not in ("task", *NOT_HERE)]
    check_keywords(settings, known, "qerl.evaluate")
    functions = Functions()
    rows = None if data is None or is_path(data) else plain_rows(data)
    asked = {
        "task": task,
        "model": None if model is None else model_name(model),
        "data": ROWS if rows is not None else data,
        "grader": grader_of(grader, functions),
        "environment": None if environment is None else environment_name(environment),
        "tools": tuple(map(environment_name, listed_tools(tools))),
        **settings,
    }
    if settings.get("adapter") is not None:
        asked["adapter"] = model_name(settings["adapter"])
    asked = typed(EvalSettings, asked, "qerl.evaluate")
    chosen = EvalSettings(**{**asked, "pass_k": tuple(sorted(set(asked.get("pass_k", ()))))})
    played = given_environments(environment, listed_tools(tools))
    with given(functions, {} if rows is None else {ROWS: rows}), played, as_before():
        from qerl.cli.evaluate import measure
        from qerl.cli.launch import one_card_each

        with one_card_each(gpu) as parallel:
            return measure(chosen, parallel)[0]


def compare(first: str | os.PathLike | EvalResult, second: str | os.PathLike | EvalResult) -> Comparison:
    """Whether the second evaluation is better or worse than the first, or whether it cannot be told.

    Each is what `qerl.evaluate` returned, or its folder. `compare(a, b).verdict` is "better", "worse" or "cannot tell";
    `paired` has the difference, its interval and the p value. Raises ConfigError if they did not ask the same.
    """
    from eval.compare import compare as compared
    from eval.result import EvalResult

    folders = [each.out if isinstance(each, EvalResult) else each for each in (first, second)]
    if wrong := [each for each in folders if not isinstance(each, str | os.PathLike)]:
        raise ConfigError(f"{wrong[0]!r:.60} is not an evaluation: give what qerl.evaluate returned, or its folder")
    return compared(*(Path(folder).expanduser() for folder in folders))


Options = TypeVar("Options")


@one_at_a_time
def quantize(
    model: str | os.PathLike, out: str | os.PathLike | None = None, *, gpu: int | None = None, **options: Any
) -> QuantizeReport:
    """Turn a 16-bit checkpoint into NVFP4, and verify it; the report's `out` is the folder.

    `options` are as for `qerl quantize`, such as method, calibration and overwrite.
    """
    from quantize.options import QuantizeOptions
    from quantize.run import quantized

    chosen = _options(QuantizeOptions, options, "qerl.quantize")
    with as_before():
        return quantized(model_name(model), None if out is None else Path(out), gpu, chosen)


@one_at_a_time
def merge(adapter: str | os.PathLike | Run, to: str, *, gpu: int | None = None, **options: Any) -> MergeReport:
    """Turn a run's adapter into a folder to serve or publish; the report's `out` is the folder.

    `to` is adapter, bf16, nvfp4, fp8_block or gguf; `options` are as for `qerl merge`.
    """
    from quantize.export.options import ExportOptions
    from quantize.export.run import merged

    chosen = _options(ExportOptions, {**options, "adapter": model_name(adapter), "to": to}, "qerl.merge")
    with as_before():
        return merged(chosen, gpu)


@one_at_a_time
def export(run: str | os.PathLike | Run, **options: Any) -> ExportReport | MergeReport:
    """Turn a run or an adapter into a folder to serve or publish; the report's `out` is the folder.

    `options` are as for `qerl export`, such as to, out, step, overwrite, force and device.
    """
    from quantize.export.options import ExportOptions
    from quantize.export.run import exported

    chosen = _options(ExportOptions, {**options, "adapter": model_name(run)}, "qerl.export")
    with as_before():
        return exported(chosen)


def _options(kind: type[Options], given: dict[str, Any], function: str) -> Options:
    """The options of a command. Raises ConfigError for one that it does not have."""
    check_keywords(given, [each.name for each in fields(kind)], function)
    return kind(**typed(kind, given, function))


logger = logging.getLogger(__name__)

KEYS = {  # argument -> the key of a recipe that it sets
    "model": "model.base",
    "task": "data.task",
    "columns": "data.columns",
    "system_prompt": "data.system_prompt",
    "prompt_template": "data.prompt_template",
    "steps": "run.steps",
    "seed": "run.seed",
    "out": "run.out",
}
Sources = Mapping[str, Any]  # name -> rows, a path, or a mapping with data, reward, weight and what a source may have


class SftArguments(TypedDict, total=False):
    """The further arguments of `qerl.sft`. They mean what the options of `qerl sft` mean."""

    model: str | os.PathLike | Run
    """Base, NVFP4 folder, run or adapter; default: the recipe's."""
    task: str
    """Prompt and grading, or for `qerl.sft` which columns are read; default: the recipe's."""
    columns: Mapping[str, str]
    """Columns of the rows: {"question": "problem", "answer": "solution"}."""
    system_prompt: str
    """System message; default: the recipe's. For `qerl.sft` of conversations that have none."""
    steps: int
    """Optimizer steps; with `resume` the run's new number in all."""
    seed: int
    """Default: the recipe's."""
    out: str | os.PathLike
    """Run directory; default: `runs/<recipe>-<time>`."""
    quantize: bool
    """Quantize the base first if that has not been done."""
    gpu: int
    """Card of this machine; default: that with the most free memory."""
    accept_changes: bool
    """With `resume`: continue although rows, rewards or packages changed."""


class TrainArguments(SftArguments, total=False):
    """The further arguments of `qerl.train`. They mean what the options of `qerl train` mean."""

    prompt_template: str
    """Message of the user, with {question} in it; default: the recipe's."""
    environment: str | Function
    """What the model talks to: a name, a class, or a program with an argument base_url."""
    tools: str | Function | Sequence[str | Function]
    """Functions that the model may call."""
    grader: str | Function
    """What says whether a completion is right; default: the task's grading."""


@one_at_a_time
@spelled_out(TrainArguments)
def train(
    recipe: Recipe | str | os.PathLike | None = None,
    *,
    reward: str | Function | Mapping[str, Any] | Sequence[str | Function | Mapping[str, Any]] | None = None,
    data: str | os.PathLike | Rows | Sources | None = None,
    resume: Run | str | os.PathLike | None = None,
    **arguments: Unpack[TrainArguments],
) -> Run:
    """Train by a recipe (a Recipe, a name, a YAML file), or continue the run `resume`; returns the run.

    `reward` replaces the recipe's rewards: a function, a name as a recipe has it, a mapping with name, weight and args,
    or a list of these. A function is called in this process with the columns that it names, and returns one number for
    each completion (docs/rewards.md). `data` are rows, the path of a file with rows, or several
    sources by name (docs/python-api.md#several-sources). The first interrupt ends the run after its step; it is saved,
    and the returned run is not finished.

    Raises QerlError for what the user can fix, in the words of the command, and leaves this process as it was.
    """
    check_keywords(arguments, ["reward", "data", "resume", *TrainArguments.__annotations__], "qerl.train")
    played = arguments.pop("environment", None), listed_tools(arguments.pop("tools", ()))
    functions = Functions()
    grader = grader_of(arguments.pop("grader", None), functions)
    rewards = None if reward is None else rewards_of(reward, functions)
    options = TrainOptions(
        gpu=arguments.pop("gpu", None),
        quantize_first=arguments.pop("quantize", False),
        accept_changes=arguments.pop("accept_changes", False),
    )
    if resume is not None:
        _check_resume(recipe, None if is_path(data) else data, [*arguments])
        named = [grader, *(each["name"] for each in rewards or ()), played[0] if isinstance(played[0], str) else None]
        files = [os.fspath(data)] if is_path(data) else []
        files += [name for name in named if name is not None and name.partition(":")[0].endswith(".py")]
        options = replace(options, overrides=tuple(f"data.source={file}" for file in files))
        with given(functions, {}), given_environments(*played), as_before():
            return _resume(model_name(resume), options, arguments)
    chosen = Recipe.load(recipe)
    if options.accept_changes:
        raise ConfigError("accept_changes is about a run that began before: leave it out, or give resume=RUN")
    changes: dict[str, Any] = {KEYS[name]: value for name, value in arguments.items()}
    if "model" in arguments:
        changes["model.base"] = model_name(arguments["model"])
    changes |= {} if grader is None else {"data.grader": grader}
    changes |= {} if rewards is None else {"rewards": rewards}
    with given_environments(*played):
        return _begin(chosen.set(changes | environment_keys(*played)), functions, data, options)


def _begin(
    recipe: Recipe, functions: Functions, data: str | os.PathLike | Rows | Sources | None, options: TrainOptions
) -> Run:
    from training.run_dir.folder import new_run_dir

    rows: Mapping[str, Rows] = {}
    if data is not None:
        run_dir = new_run_dir(recipe.config.run.out, recipe.name)
        if is_sources(data):
            sources, rows = sources_of(data, functions, run_dir)
            changes = {"data.sources": sources, "data.source": None, "data.limit": None}
        elif is_path(data):
            changes = {"data.source": os.fspath(data)}
        else:
            source, given_rows = str(run_dir / ROWS_of_given), plain_rows(data)
            rows, changes = {source: given_rows}, {"data.source": source, **_own_task(recipe, given_rows)}
        recipe = recipe.set({**changes, "run.out": str(run_dir)})
    with given(functions, rows):
        check_new(recipe.config, recipe.name)
        with as_before():
            return run_of_result(begin(recipe.config, recipe.source, options)[0])


def _own_task(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The task `own` for rows that bring their prompts, where the recipe's task finds no question in them."""
    config = recipe.config.data
    task = get_task(config.task)
    asked = task.columns["question"]
    if config.columns or not brings_prompts(rows, ["question", *([asked] if isinstance(asked, str) else asked)]):
        return {}
    logger.info("the rows bring their own prompts: task own in place of %s", task.name)
    return {"data.task": "own"}


def _check_resume(recipe: object, data: object, arguments: Sequence[str]) -> None:
    given = [name for name, value in (("recipe", recipe), ("data", data)) if value is not None]
    given += [name for name in arguments if name not in ("steps", "model")]
    if given:
        raise ConfigError(
            f"resume continues a run as it was configured, and {given[0]} would change that: leave it out; steps, "
            "model, data, grader and rewards by their paths (for what has moved), accept_changes, gpu and the run's "
            "own functions go with resume"
        )


def _resume(run: str, options: TrainOptions, arguments: Mapping[str, Any]) -> Run:
    model = arguments.get("model")
    steps = typed(TrainOptions, {"steps": arguments.get("steps")}, "qerl.train")
    chosen = replace(options, **steps, resume=run, model=model and model_name(model))
    return run_of_result(go_on(*find_resumed(chosen, run), chosen)[0])


def run_of_result(result: TrainResult) -> Run:
    if result.adapter is None:
        logger.warning("the run is not finished: qerl.train(resume=%r) continues it", str(result.run_dir))
    return Run(Path(result.run_dir))


@spelled_out(SftArguments)
def sft(
    recipe: Recipe | str | os.PathLike | None = None,
    *,
    data: str | os.PathLike | Rows | None = None,
    resume: Run | str | os.PathLike | None = None,
    **arguments: Unpack[SftArguments],
) -> Run:
    """Let a model learn from conversations by a recipe, or continue the run `resume`; returns the run.

    `data` are rows with `messages`, or with `prompt` and `completion`, or the path of a file with such rows
    (docs/sft.md). A recipe without the section `sft` gets one with its defaults. Otherwise it is as `qerl.train`, and
    `qerl.train(..., model=run)` goes on from what was learned.
    """
    check_keywords(arguments, [*SftArguments.__annotations__], "qerl.sft")
    if resume is not None:
        return train(recipe, data=data, resume=resume, **arguments)
    chosen = Recipe.load(recipe)
    return train(chosen if chosen.config.sft is not None else chosen.set({"sft": {}}), data=data, **arguments)


class DistillArguments(TrainArguments, total=False):
    """The further arguments of `qerl.distill`. They mean what the options of `qerl distill` mean."""

    teacher: str | os.PathLike
    """16-bit model with the student's tokenizer; default: the recipe's, or the own base."""


@spelled_out(DistillArguments)
def distill(
    recipe: Recipe | str | os.PathLike | None = None,
    *,
    data: str | os.PathLike | Rows | Sources | None = None,
    resume: Run | str | os.PathLike | None = None,
    **arguments: Unpack[DistillArguments],
) -> Run:
    """Let a model learn from a 16-bit teacher on completions that it samples itself, or continue the run `resume`.

    A recipe without the section `distill` gets one with its defaults, without what is no part of a distillation:
    dynamic sampling, and the KL and entropy terms of the loss. Otherwise it is as `qerl.train`.
    """
    check_keywords(arguments, ["data", "resume", *DistillArguments.__annotations__], "qerl.distill")
    teacher = arguments.pop("teacher", None)
    if resume is not None:
        if teacher is not None:
            raise ConfigError("resume continues a run as it was configured; teacher would change that: leave it out")
        return train(recipe, data=data, resume=resume, **arguments)
    chosen = Recipe.load(recipe)
    changes: dict[str, Any] = {} if chosen.config.distill is not None else {"distill": {}}
    changes |= {} if teacher is None else {"distill.teacher": model_name(teacher)}
    return train(chosen.set(*DistillOptions.implied, changes), data=data, **arguments)
