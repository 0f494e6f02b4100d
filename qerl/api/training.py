"""`qerl.train`: a run from a recipe, or the continuation of one, in a script or a notebook."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from qerl.api.arguments import (
    Function,
    Functions,
    Rows,
    check_keywords,
    grader_of,
    is_path,
    model_name,
    plain_rows,
    rewards_of,
)
from qerl.api.environments import environment_keys, given_environments
from qerl.api.given import ROWS, given
from qerl.api.recipe import Recipe
from qerl.api.run import Run
from qerl.api.sources import brings_prompts, is_sources, sources_of
from qerl.base.errors import ConfigError
from qerl.cli.train import begin, check_new, find_resumed, go_on
from qerl.cli.train_options import TrainOptions
from qerl.data.tasks import get_task

if TYPE_CHECKING:
    from training.run import TrainResult

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


class TrainArguments(TypedDict, total=False):
    """The further arguments of `qerl.train`. They mean what the options of `qerl train` mean."""

    model: str | os.PathLike | Run  # base, NVFP4 folder, run or adapter; default: the recipe's
    task: str  # prompt and grading; default: the recipe's, or `own` for rows with a prompt or messages
    columns: Mapping[str, str]  # of data: {"question": "problem", "answer": "solution"}
    system_prompt: str
    prompt_template: str
    environment: str | Function  # what the model talks to: a name, a class, or a program with an argument base_url
    tools: str | Function | Sequence[str | Function]  # functions that the model may call
    grader: str | Function  # what says whether a completion is right; default: the task's grading
    steps: int  # optimizer steps; with `resume` the run's new number in all
    seed: int
    out: str | os.PathLike  # run directory; default: runs/<recipe>-<time>
    quantize: bool  # quantize the base first if that has not been done
    gpu: int  # card of this machine; default: that with the most free memory
    accept_changes: bool  # with `resume`: continue although rows, rewards or packages changed


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
    each completion (docs/own-data-and-reward.md#reward). `data` are rows, the path of a file with rows, or several
    sources by name (docs/python-api.md#several-sources). The first interrupt ends the run after its step; it is saved,
    and the returned run is not finished.

    Raises QerlError for what the user can fix, in the words of the command, and leaves this process as it was.
    """
    from qerl.api.process import as_before

    known = ["reward", "data", "resume", *TrainArguments.__annotations__]
    check_keywords(arguments, known, "qerl.train")
    tools = arguments.pop("tools", ())
    played = arguments.pop("environment", None), (tools,) if isinstance(tools, str) or callable(tools) else tuple(tools)
    functions = Functions()
    grader = grader_of(arguments.pop("grader", None), functions)
    rewards = None if reward is None else rewards_of(reward, functions)
    options = TrainOptions(
        gpu=arguments.pop("gpu", None),
        quantize_first=arguments.pop("quantize", False),
        accept_changes=arguments.pop("accept_changes", False),
    )
    if resume is not None:
        _check_resume(recipe, data, [*arguments])
        with given(functions, {}), given_environments(*played), as_before():
            return _resume(model_name(resume), options, arguments)
    if recipe is None:
        raise ConfigError("no recipe was given: write qerl.train('tiny'), or qerl.train(resume=RUN); see qerl recipes")
    if options.accept_changes:
        raise ConfigError("accept_changes is about a run that began before: leave it out, or give resume=RUN")
    changes: dict[str, Any] = {KEYS[name]: value for name, value in arguments.items()}
    if "model" in arguments:
        changes["model.base"] = model_name(arguments["model"])
    changes |= {} if grader is None else {"data.grader": grader}
    changes |= {} if rewards is None else {"rewards": rewards}
    chosen = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    with given_environments(*played):
        return _begin(chosen.set(changes | environment_keys(*played)), functions, data, options)


def _begin(
    recipe: Recipe, functions: Functions, data: str | os.PathLike | Rows | Sources | None, options: TrainOptions
) -> Run:
    from qerl.api.process import as_before
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
            rows = {str(run_dir / ROWS): plain_rows(data)}
            changes = {"data.source": str(run_dir / ROWS), **_own_task(recipe, rows[str(run_dir / ROWS)])}
        recipe = recipe.set({**changes, "run.out": str(run_dir)})
    with given(functions, rows):
        check_new(recipe.config, recipe.name)
        with as_before():
            return _run_of(begin(recipe.config, recipe.source, options)[0])


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
            "model (for a base that has moved), accept_changes, gpu and the run's own functions go with resume"
        )


def _resume(run: str, options: TrainOptions, arguments: Mapping[str, Any]) -> Run:
    from dataclasses import replace

    model = arguments.get("model")
    chosen = replace(options, resume=run, steps=arguments.get("steps"), model=model and model_name(model))
    return _run_of(go_on(*find_resumed(chosen, run), chosen)[0])


def _run_of(result: TrainResult) -> Run:
    if result.adapter is None:
        logger.warning("the run is not finished: qerl.train(resume=%r) continues it", str(result.run_dir))
    return Run(Path(result.run_dir))
