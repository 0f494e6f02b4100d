"""`qerl train --resume RUN --steps N`: change the number of steps of a run, finished or not.

Learning rate and noise depend on the step and on N. From the next step on they have the values of a run that was
started with N steps, so they may jump: after the end of a cosine schedule the learning rate rises again, and so does
sigma. What was trained before stays as it is.

Nothing is deleted: an earlier result is moved to `replaced-<time>/`. The recipe is changed last, so that a kill before
leaves the finished run, and a kill afterwards leaves one that continues.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.config.recipe import load_config, save_config
from qerl.errors import ConfigError
from qerl.files.disk import replace_text
from training.run_dir.checkpoint import checkpoint_step, checkpoints
from training.run_dir.folder import make_aside, read_about

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

    from qerl.config.schema import NoiseConfig, RunConfig

logger = logging.getLogger(__name__)


def with_steps(run_dir: Path, steps: int | None, done: int) -> RunConfig:
    """The recipe of a run that has done `done` steps, with the new total `steps` if one is given.

    Raises ConfigError if the run cannot be prolonged to that total.
    """
    config = load_config(run_dir / "config.yaml")
    if steps is None:
        return config
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
    return load_config(run_dir / "config.yaml", steps=steps)


def newest_step(run_dir: Path) -> int:
    """The step of the last checkpoint, damaged or not; 0 without a checkpoint."""
    return max(map(checkpoint_step, checkpoints(run_dir)), default=0)


def prolong_(run_dir: Path, config: RunConfig, done: int) -> None:
    """Make `config.run.steps` the run's number of steps. The caller has to hold the lock of the run directory."""
    before, about = load_config(run_dir / "config.yaml").run.steps, read_about(run_dir)
    changes = about.get("totals", [])
    changed = before != config.run.steps
    if not changed and all(change["after"] <= done for change in changes):
        return
    if changed and (run_dir / "adapter").is_dir():
        aside = make_aside(run_dir)
        (run_dir / "adapter").rename(aside / "adapter")
        logger.info("the result of %d steps is in %s now", done, aside)
    about["totals"] = _changes(changes, done, before, config.run.steps)
    replace_text(run_dir / "run.json", json.dumps(about, indent=1))
    if changed:
        save_config(config, run_dir / "config.yaml")
        _say_change(config, done, before)


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


def _say_change(config: RunConfig, done: int, before: int) -> None:
    logger.info("the run has %d steps instead of %d from here on", config.run.steps, before)
    if config.noise.enabled and config.noise.controller.metric == "off":
        sigma, was = (_sigma(config.noise, done, steps) for steps in (config.run.steps, before))
        if sigma != was:
            logger.info("sigma of the next step: %.3g (as it was: %.3g)", sigma, was)


def _sigma(noise: NoiseConfig, step: int, steps: int) -> float:
    from training.rollout.noise import stage_of, stage_sigmas  # it imports torch, which errors before must not wait for

    return stage_sigmas(noise)[stage_of(step, steps, noise.num_stages)]


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
