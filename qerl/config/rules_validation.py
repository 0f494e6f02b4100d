"""The rules of `qerl/config/rules.py` about validation: it exists, and what follows from it can follow."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from qerl.config.conflict import Conflict, Conflicts
from qerl.config.rules_tasks import columns_of
from qerl.engine.interface import MIN_TEMPERATURE

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


def validation(config: RunConfig) -> Conflicts:
    """Whoever asks for something that validations decide has validations, at steps that can be saved."""
    this = config.validation
    if this.every is None:
        for key in ("stop_after", "target"):
            if (value := getattr(this, key)) is not None:
                yield Conflict(
                    {f"validation.{key}": value, "validation.every": None},
                    "without validations nothing would end the run",
                    f"validation.every: 50, or leave {key} out",
                )
        return
    yield from _rows(config)
    yield from _sampling(config)
    yield from _verdict(config)
    updates = config.loss.num_iterations
    if this.every % updates:
        yield Conflict(
            {"loss.num_iterations": updates, "validation.every": this.every},
            "a validated step has to be one that can be saved, which it cannot between two updates on one rollout",
            f"validation.every: {(this.every // updates + 1) * updates}",
        )


def _rows(config: RunConfig) -> Conflicts:
    from qerl.data.tasks import TASKS

    this, names = config.validation, list(TASKS)
    if this.task is not None and this.task not in names:
        near = difflib.get_close_matches(this.task, names, n=1, cutoff=0.4)
        hint = f"validation.task: {near[0]} (tasks: {', '.join(names)})" if near else f"one of {', '.join(names)}"
        yield Conflict(
            {"validation.task": this.task}, "there is no such task", f"{hint}; a file of rows is validation.source"
        )
    yield from columns_of("validation.columns", this.columns)


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
    if this.metric not in ("accuracy", "reward", "loss", *of_sources) and not this.metric.startswith("rewards/"):
        others = f", or of one source {', '.join(of_sources)}" if of_sources else ""
        yield Conflict(
            {"validation.metric": this.metric},
            "no validation gives a value of that name that is the better the higher it is",
            f"validation.metric: accuracy, reward, or one of the rewards as rewards/NAME{others}",
        )
    if this.min_improvement and this.stop_after is None:
        yield Conflict(
            {"validation.min_improvement": this.min_improvement, "validation.stop_after": None},
            "nothing would read it: the best checkpoint is the best by any difference",
            "validation.stop_after: 5, or leave min_improvement out",
        )
    if config.sft is None and this.metric == "accuracy" and this.target is not None and not 0 < this.target <= 1:
        yield Conflict(
            {"validation.target": this.target, "validation.metric": "accuracy"},
            "an accuracy lies between 0 and 1",
            f"validation.target: {this.target / 100:g}" if 1 < this.target <= 100 else "validation.target: 0.9",
        )
