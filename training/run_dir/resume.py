"""`qerl train --resume [RUN|STEP] [--steps N]`: find the run and its checkpoint, rewind it, change its number of steps.

    --resume          the newest run under runs/ (with --recipe R the newest of R, with --out DIR the one there)
    --resume runs/x   this run, from its newest good checkpoint
    --resume 40       the run as in the first line, from its checkpoint of step 40
    --resume runs/x/checkpoints/step-000040   from there

Nothing is deleted: an earlier result and later checkpoints are moved to `replaced-<time>/`. The recipe is changed last,
so that a kill before leaves the finished run, and a kill afterwards leaves one that continues. With --model BASE the
base is taken from where it is now; its weights have to be those that the run began with. Files of rows, graders,
rewards and environments that have moved are named likewise; they keep their names, and what they hold is compared.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError, ConfigError, DataError
from qerl.base.files import expanded, no_folder, replace_text
from qerl.checkpoint.folder import MODEL, RUNS, beside, run_folder, weights_digest
from qerl.checkpoint.hub import is_hub_id
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.resolve import ModelRef, starting_model
from qerl.config.recipe import load_config, save_config
from qerl.data.rows import FORMATS
from training.run_dir.checkpoint import checkpoint_path, checkpoint_step, checkpoints, damage_of
from training.run_dir.folder import make_aside, only_writer, read_about, written
from training.run_dir.inputs import check_same_kind

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

    from qerl.config.schema import RunConfig

LAST = "last"  # the value of `--resume` if none is given
SUFFIXES = (".py", ".gz", *FORMATS)  # of files that a recipe names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved:
    """Where a run's base is now, and its files, which keep their names; nothing if they are where they were."""

    base: str | None = None
    files: tuple[str, ...] = ()


NOTHING_MOVED = Moved()


def find_run(ref: str, recipe: str | None = None, out: Path | None = None) -> tuple[Path, int | None]:
    """(run directory, step to continue from or None for the newest). Raises ConfigError, which lists what there is."""
    run_dir, step = _find(ref, recipe, out)
    check_run(run_dir)
    if step is not None:
        _check_step(run_dir, step)
    return run_dir, step


def check_run(run_dir: Path) -> None:
    """Raise ConfigError if the folder is not a run directory."""
    if os.path.isfile(run_dir / "config.yaml"):
        return
    what = f"{run_dir} is not a run: it has no config.yaml" if os.path.exists(run_dir) else no_folder(str(run_dir))
    raise ConfigError(f"{what}; give the directory that `qerl train` printed")


def check_same_base(run_dir: Path, base: str) -> None:
    """Raise ConfigError if weights or configs of the base changed since the run began, according to run.json."""
    began_on = read_about(run_dir).get("weights")
    if began_on is not None and began_on != weights_digest(local_folder(base)):
        raise ConfigError(
            f"{base} holds other weights than when {run_dir} began (was it quantized again?), or another config.json "
            "or generation_config.json: put those back, or start a new run from this one's adapter with "
            f"--model {run_dir}"
        )


def _find(ref: str, recipe: str | None, out: Path | None) -> tuple[Path, int | None]:
    if ref != LAST and not ref.isdecimal():
        if recipe is not None or out is not None:
            raise ConfigError(f"--resume {ref} names the run: leave --recipe and --out out")
        path = run_folder(ref)
        if path.parent.name == "checkpoints" and (path.parents[1] / "config.yaml").is_file():
            if path not in checkpoints(path.parents[1]):
                raise ConfigError(f"{path} is no checkpoint: {_steps(path.parents[1])}")
            return path.parents[1], checkpoint_step(path)
        return path, None
    run = out or newest_run(recipe)
    return run, None if ref == LAST else int(ref)


def newest_run(recipe: str | None = None) -> Path:
    """The newest run under runs/, of `recipe` if that is given. Raises ConfigError if there is none."""
    found = {file.parent: file.stat().st_mtime for file in RUNS.glob("*/metrics.jsonl") if _is_of(file.parent, recipe)}
    if not found:
        of = f" of recipe {recipe}" if recipe else ""
        raise ConfigError(f"there is no run{of} in {RUNS}/ to continue: write `qerl train --resume DIR`")
    newest = max(found, key=found.get)
    logger.info("no run was named: taking the newest%s, %s", f" of {recipe}" if recipe else "", newest)
    return newest


def rewind_(run_dir: Path, step: int) -> None:
    """Make the checkpoint of `step` the newest one by moving later ones and the result to `replaced-<time>/`.

    Nothing is deleted. Raises ConfigError if there is no good checkpoint of that step, or if another process writes to
    the run.
    """
    _check_step(run_dir, step)
    if damage := damage_of(checkpoint_path(run_dir, step)):
        raise ConfigError(f"the checkpoint of step {step} is damaged ({damage}): {_steps(run_dir)}")
    later = [path for path in checkpoints(run_dir) if checkpoint_step(path) > step]
    later += [path for path in _results(run_dir) if later]
    if not later:
        return
    with only_writer(run_dir, written(run_dir)):
        aside = make_aside(run_dir)
        for path in reversed(later):  # the result first, so that a kill in between leaves a run that continues
            path.rename(aside / path.name)
    logger.warning("continuing from step %d: %s moved to %s", step, ", ".join(p.name for p in later), aside)


def _check_step(run_dir: Path, step: int) -> None:
    if checkpoint_path(run_dir, step) not in checkpoints(run_dir):
        raise ConfigError(f"{run_dir} has no checkpoint of step {step}: {_steps(run_dir)}")


def _is_of(run: Path, recipe: str | None) -> bool:
    if not (run / "config.yaml").is_file():
        return False
    if recipe is None:
        return True
    try:
        return read_about(run).get("recipe") == Path(recipe).stem
    except DataError:
        return False


def _steps(run_dir: Path) -> str:
    steps = [str(checkpoint_step(path)) for path in checkpoints(run_dir)]
    return f"there are steps {', '.join(steps)}" if steps else "it has none yet, write --resume and the run"


def config_to_resume(
    run_dir: Path, step: int | None = None, steps: int | None = None, moved: Moved = NOTHING_MOVED
) -> tuple[RunConfig, int]:
    """The recipe of a run that continues from `step` to `steps`, and the number of steps done.

    Without `step` the run continues from its last checkpoint, damaged or not; without `steps` the number of steps is
    the run's own. Raises ConfigError if this is not a run, if it cannot continue to that number, or if what it trains
    through the quantizer was changed.
    """
    check_run(run_dir)

    def prolonged(steps: int | None) -> RunConfig:
        config = load_config(run_dir / "config.yaml", base=moved.base, steps=steps)
        return with_moved(config, run_dir, moved.files)

    config = prolonged(None)
    check_same_kind(run_dir, config)
    done = max(map(checkpoint_step, checkpoints(run_dir)), default=0) if step is None else step
    if steps is None:
        return config, done
    if steps <= done:
        raise ConfigError(
            f"{run_dir} has {done} steps behind it, and --steps {steps} is the number in all: write --steps {done + 1} "
            "or more, or take up an earlier step with --resume STEP"
        )
    updates = config.loss.num_iterations
    if done % updates:
        earlier = [checkpoint_step(path) for path in checkpoints(run_dir) if checkpoint_step(path) % updates == 0]
        remedy = f"take it up before, `--resume {earlier[-1]} --steps {steps}`" if earlier else "start a new one"
        raise ConfigError(
            f"{run_dir} ended between two updates on one rollout (step {done}, loss.num_iterations {updates}), which "
            f"is not kept: {remedy}"
        )
    return prolonged(steps), done


def with_moved(config: RunConfig, run_dir: Path, moved: Sequence[str]) -> RunConfig:
    """The recipe with the files `moved` in place of those of the same name; rows that are kept in the run are found.

    A function of a file may be left out, `new/grader.py`. Raises ConfigError for one that the run does not name.
    """
    data = config.model_dump()
    for _, place, key in _files(data):
        kept = run_dir / Path(place[key]).name
        if key == "source" and not expanded(place[key]).exists() and kept.is_file():
            place[key] = str(kept)
    for new in moved:
        found = [(place, key) for _, place, key in _files(data) if _is_moved(place[key], new)]
        if not found:
            named = ", ".join(place[key] for _, place, key in _files(data)) or "none"
            raise ConfigError(
                f"--resume continues a run as it was configured, and {run_dir} names no file {Path(new).name} "
                f"(its files: {named}): what has moved keeps its name; leave it out, or start a new run"
            )
        for place, key in found:
            path, function = _split(new)
            place[key] = f"{path}{function or _split(place[key])[1]}"
    return config if data == config.model_dump() else type(config).model_validate(data)


def check_files(config: RunConfig, run_dir: Path) -> None:
    """Raise an error that names every file of rows, grader, reward or environment that is not where it was."""
    options = {"data.source": "--data PATH", "data.grader": "--grader PATH", "environment.name": "--environment PATH"}
    gone = [
        (name, place[key])
        for name, place, key in _files(config.model_dump())
        if not _split(place[key])[0].expanduser().exists()
    ]
    if gone:
        raise (DataError if gone[0][0].endswith("source") else ConfigError)(
            f"{run_dir} was begun with {' and '.join(map(' '.join, gone))}, which {'is' if len(gone) == 1 else 'are'} "
            f"not here: add {' '.join(options.get(name, f'--set {name}=PATH') for name, _ in gone)} to `qerl train "
            f"--resume {run_dir}`, with the place where each is now"
        )


def _files(data: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """(key of the recipe, mapping, its key) of each value that names a file or a folder by its path."""
    rows, own = data["data"], data.get("environment")
    found = [(f"data.{key}", rows, key) for key in ("source", "grader")]
    found += [("validation.source", data["validation"], "source")]
    found += [(f"rewards.{i}.name", each, "name") for i, each in enumerate(data["rewards"])]
    for i, each in enumerate(rows["sources"]):
        key = f"data.sources.{i}"
        found += [(f"{key}.source", each, "source"), (f"{key}.grader", each, "grader")]
        found += [(f"{key}.rewards.{j}.name", one, "name") for j, one in enumerate(each["rewards"])]
        found += [(f"{key}.validation.source", each["validation"], "source")] if each["validation"] else []
    found += [("environment.name", own, "name")] if own else []
    return [one for one in found if (value := one[1][one[2]]) is not None and _is_file(value)]


def _is_file(value: str) -> bool:
    """Whether it is the path of a file: not a hub id, a module, a registered name, a URL, or given by a program."""
    path = _split(value)[0]
    return "://" not in value and not value.startswith("python:") and (path.suffix in SUFFIXES or value[:1] in "./~")


def _is_moved(old: str, new: str) -> bool:
    """Whether `new` may be the place of `old` now: a file of the same name, and its function unless one names none."""
    (file, function), (other, of_other) = _split(old), _split(new)
    return file.name == other.name and (function == of_other or not function or not of_other)


def _split(value: str) -> tuple[Path, str]:
    """The file, and the function in it with its colon: `grader.py`, `:right`."""
    path, _, function = value.rpartition(":")
    return (Path(path), f":{function}") if path.endswith(".py") else (Path(value), "")


def starting_base(config: RunConfig, run_dir: Path | None = None) -> ModelRef:
    """What a recipe starts from, for a new run or for one that continues in `run_dir`. Raises as `starting_model`."""
    return starting_model(config.model.base, config.model.format, config.kind.packs, run_dir)


def base_to_resume(run_dir: Path, config: RunConfig) -> ModelRef:
    """The base of a run that continues.

    Raises CheckpointError, which names --model, if it is not there; ConfigError if it is an adapter and the run began
    without one, or the other way round.
    """
    base = config.model.base
    try:
        found = starting_base(config, run_dir)
    except CheckpointError as error:
        if is_hub_id(base) or expanded(beside(run_dir, base)).exists():
            raise
        raise CheckpointError(
            f"{run_dir} was trained on {base}, which is not here: write `qerl train --resume {run_dir} --model BASE` "
            f"with the place where it is now ({error})"
        ) from error
    on_adapter = read_about(run_dir).get("on_adapter", found.adapter is not None)
    if on_adapter != (found.adapter is not None):
        kinds = ("a base", "a run or an adapter")
        raise ConfigError(
            f"{run_dir} began from {kinds[on_adapter]} and {base} is {kinds[not on_adapter]}: give the model that it "
            "began from as --model"
        )
    return found


def note_base_(run_dir: Path, config: RunConfig, base: str) -> None:
    """Let the run's files name its base and its files by the places where they are now. The caller has to hold the
    run's lock."""
    saved = load_config(run_dir / "config.yaml")
    if saved.model.base != config.model.base:
        replace_text(run_dir / "run.json", json.dumps(read_about(run_dir) | {"base": base}, indent=1))
        logger.info("the base of %s is %s from here on", run_dir, base)
    before, now = ([place[key] for _, place, key in _files(each.model_dump())] for each in (saved, config))
    if saved.model.base != config.model.base or before != now:
        save_config(config, run_dir / "config.yaml")


def _results(run_dir: Path) -> list[Path]:
    """What a finished run has made: its adapter or its model."""
    return [path for path in (run_dir / "adapter", run_dir / MODEL) if path.is_dir()]


def prolong_(run_dir: Path, config: RunConfig, done: int) -> None:
    """Make `config.run.steps` the run's number of steps. The caller has to hold the lock of the run directory.

    Learning rate and noise depend on the step and on that number. From the next step on they have the values of a run
    that was started with it, so they may jump: after the end of a cosine schedule the learning rate rises again, and so
    does sigma. What was trained before stays as it is.
    """
    before, about = load_config(run_dir / "config.yaml").run.steps, read_about(run_dir)
    changes = about.get("totals", [])
    changed = before != config.run.steps
    if not changed and all(change["after"] <= done for change in changes):
        return
    for result in _results(run_dir) if changed else ():
        aside = make_aside(run_dir)
        result.rename(aside / result.name)
        logger.info("the result of %d steps is in %s now", done, aside)
    about["totals"] = _changes(changes, done, before, config.run.steps)
    replace_text(run_dir / "run.json", json.dumps(about, indent=1))
    if changed:
        save_config(config, run_dir / "config.yaml")
        logger.info("the run has %d steps instead of %d from here on", config.run.steps, before)


def _changes(changes: list[dict], done: int, before: int, steps: int) -> list[dict]:
    """The list of changes to a run's number of steps, for run.json.

    Changes made before step `done` are kept; all later ones become one change, to `steps`.
    """
    kept = [change for change in changes if change["after"] < done]
    later = [*(change for change in changes if change["after"] >= done), {"was": before, "command": sys.argv}]
    if not done or later[0]["was"] == steps:
        return kept
    command = later[-1 if before != steps else -2]["command"]
    return [*kept, {"after": done, "was": later[0]["was"], "is": steps, "command": command}]


def set_rates_(scheduler: LambdaLR) -> None:
    """Set the optimizer's learning rates to those that this run's schedule has at the loaded step.

    A checkpoint brings the rates of the number of steps that the run had then. If that has not changed, the rates are
    equal to the bit.
    """
    rules = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * rule(scheduler.last_epoch) for base, rule in rules]
    groups = scheduler.optimizer.param_groups
    if (before := groups[0]["lr"]) != rates[0]:
        logger.info("learning rate of the next step: %.3g (as it was: %.3g)", rates[0], before)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
