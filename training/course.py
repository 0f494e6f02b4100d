"""The course of a run of any kind: its directory, its log, its signals, its loop and its end.

A kind of run (training/run.py, training/sft/run.py) checks and opens what it needs, and is then carried out here.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback

from qerl.api.arguments import write_given_rows
from qerl.base.files import replace_text
from qerl.base.parallel import Parallel, check_same
from qerl.checkpoint.adapter_file import export_line, trains_weights, weights_digest
from qerl.checkpoint.load import local_folder
from qerl.config.recipe import save_config
from qerl.plan.micro_batch_plan import MicroBatchPlan, smallest_plan
from qerl.plan.plan import wishes_of
from qerl.plan.trained import acting_rank, trains_masters
from qerl.report.read import sampling_text
from training.policy.train_memory import as_record, plan_run, recorded_plan, warn_of_retries
from training.preflight.checks import sizes_at
from training.preflight.start import keep_start_
from training.run_dir.checkpoint import checkpoint_step
from training.run_dir.folder import only_writer
from training.run_dir.inputs import Inputs, check_same_inputs, note_inputs, qat_record, versions
from training.run_dir.log import NoLog, RunLog, read_metrics
from training.run_dir.result import ADAPTER, BEST, settle_best, settle_model, settle_result
from training.run_dir.resume import note_base_, prolong_
from training.run_dir.stop import Stop, stop_on_signals, train_until_stopped
from training.run_dir.terminal_gone import terminal_may_go
from training.run_dir.trackers import open_trackers
from training.validation.verdict import best_kept, best_of, decisive, ending, shown, validations

if TYPE_CHECKING:
    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig
    from qerl.engine.interface import Engine
    from training.policy.policy import Policy
    from training.run_trainer import RunTrainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands when `train` returns."""

    run_dir: Path
    adapter: Path | None  # the folder of the adapter, or of the model; None if it was stopped before its last step
    steps: int
    stopped_by: int | None = None  # the number of the signal that asked it to stop, if one did


@dataclass(frozen=True)
class Place:
    """The folder of a run, its recipe's name, and which of its processes this is."""

    run_dir: Path
    name: str
    parallel: Parallel


@dataclass(frozen=True)
class Course:
    """A run that was checked and opened, before anything of it is written."""

    config: RunConfig
    base: ModelRef
    place: Place
    checkpoint: Path | None  # that it continues from
    found: list[str]  # in its directory, before it was checked
    inputs: Inputs
    plan: MicroBatchPlan

    @property
    def start_step(self) -> int:
        """The steps that are done."""
        return checkpoint_step(self.checkpoint) if self.checkpoint else 0


def agree_on_inputs(config: RunConfig, base: ModelRef, place: Place, inputs: Inputs, accept_changes: bool) -> None:
    """Raise QerlError if ranks were given different things, or other things than when the run began."""
    parallel = place.parallel
    if parallel.size > 1:
        facts = {"recipe": config.model_dump(), **inputs, "version of a package": versions()}
        check_same(parallel, {**facts, "base": weights_digest(local_folder(base.base))})
    if parallel.first:
        check_same_inputs(place.run_dir, inputs, accept_changes)


def settled_plan(config: RunConfig, base: ModelRef, place: Place, policy: Policy, engine: Engine) -> MicroBatchPlan:
    """The plan that the run began with, or a new one by the memory that is free now; of ranks the smallest."""
    parallel = place.parallel
    plan = recorded_plan(place.run_dir, config.run.micro_batch_tokens) if parallel.first else None
    if (plan := parallel.broadcast(plan)) is not None:
        return plan
    entropy, cap = config.loss.entropy_coef > 0, config.memory.cap_gib
    own = plan_run(policy, engine, wishes_of(config, sizes_at(base)), acting_rank(config), entropy, cap)
    return smallest_plan(parallel.gather(own))


def carry_out(
    course: Course, begin: Callable[[RunLog, Stop], RunTrainer], close: Callable[[RunTrainer, bool], None]
) -> TrainResult:
    """Train in the run's directory, and finish it.

    `begin` makes the trainer. `close` gives back what was opened; it is told whether a step was abandoned.
    """
    config, place = course.config, course.place
    run_dir, parallel = place.run_dir, place.parallel
    with (
        _log(course) as log,
        stop_on_signals(config.run, config.loss.num_iterations, run_dir, parallel) as stop,
    ):
        if parallel.first:
            _open_run_dir(course)
            note_inputs(run_dir, course.inputs, course.start_step)
            prolong_(run_dir, config, course.start_step)
            note_base_(run_dir, config, course.base.base)
        log.start_at(course.start_step)
        if parallel.first:
            settle_best(run_dir, best_kept(log.validations, config.validation))
        trainer = begin(log, stop)
        trainer.remove_callback(PrinterCallback)
        with opened_set_aside():
            steps = train_until_stopped(trainer, stop, course.checkpoint)
        if not stop.abandoned:
            warn_of_retries()
        close(trainer, stop.abandoned)
        ended = trainer.validation is not None and trainer.validation.ended(steps)
        return replace(finished(run_dir, steps, config, parallel, ended), stopped_by=stop.asked)


@contextmanager
def opened_set_aside() -> Iterator[None]:
    """Within it, Python's garbage collection leaves out what there is now: the libraries and the opened models.

    vLLM's engine collects garbage each time it wakes, since a cycle may hold memory of the card. To look at all objects
    of a process with torch, transformers and TRL took 0.23 s where it was measured, and that in every step.
    """
    if torch.cuda.is_available():
        gc.collect()  # garbage would be kept as well
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _log(course: Course) -> Iterator[RunLog]:
    """The run's log, with the trackers, of which only the first rank writes; it holds the lock of the run directory."""
    run_dir, config, steps = course.place.run_dir, course.config, course.config.run.steps
    if not course.place.parallel.first:
        yield NoLog(run_dir, steps)
        return
    with (
        only_writer(run_dir, course.found),
        terminal_may_go(run_dir),
        open_trackers(config, run_dir, course.start_step) as trackers,
        RunLog(run_dir, steps, trackers=trackers) as log,
    ):
        yield log


def _open_run_dir(course: Course) -> None:
    """Create the directory, or what a kill kept from being made. With config.yaml a run can resume, and only the rows
    that a program gave come before it."""
    config, base, run_dir = course.config, course.base, course.place.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    write_given_rows(run_dir)
    keep_start_(run_dir, config.adapter.start, base.start)
    if not (run_dir / "config.yaml").exists():
        save_config(config, run_dir / "config.yaml")
    (run_dir / "metrics.jsonl").touch()
    if not (run_dir / "run.json").exists():
        about = {"recipe": course.place.name, "base": base.base, "command": sys.argv, "versions": versions()}
        about |= {"inputs": dict(course.inputs), "on_adapter": base.adapter is not None}
        about |= {"weights": weights_digest(local_folder(base.base)), "micro_batches": as_record(course.plan)}
        about |= {"qat": qat_record(config.qat)}
        replace_text(run_dir / "run.json", json.dumps(about, indent=1))
    logger.info("writing to %s", run_dir)


def finished(run_dir: Path, steps: int, config: RunConfig, parallel: Parallel, ended: bool = False) -> TrainResult:
    """`_finish` by the rank that writes; the others only say where the run stands. `ended`: by a validation."""
    if parallel.first:
        return _finish(run_dir, steps, config)
    return TrainResult(run_dir, run_dir / ADAPTER if ended or steps >= config.run.steps else None, steps)


def _finish(run_dir: Path, steps: int, config: RunConfig) -> TrainResult:
    """Say how a run ended; after its last step, or one that validation made the last, its adapter is the result."""
    rows = read_metrics(run_dir)
    settle_best(run_dir, best_kept(rows, config.validation))
    if steps < config.run.steps and not ending(rows, config.validation, steps):
        logger.warning("stopped after step %d; continue with `qerl train --resume %s`", steps, run_dir)
        return TrainResult(run_dir, None, steps)
    if config.qat is not None:
        final = settle_model(run_dir, steps)
        if not trains_masters(config):
            settle_result(run_dir, steps)
        logger.info("finished %d steps: %s; model in %s", steps, _reward_text(rows, run_dir), final)
        _say_best(run_dir, rows, config)
        return TrainResult(run_dir, final, steps)
    final = settle_result(run_dir, steps)
    logger.info("finished %d steps: %s; adapter in %s", steps, _reward_text(rows, run_dir), final)
    if sampling := sampling_text(rows):
        logger.info("dynamic sampling: %s", sampling)
    _say_best(run_dir, rows, config)
    return TrainResult(run_dir, final, steps)


def _say_best(run_dir: Path, rows: Sequence[Mapping[str, Any]], config: RunConfig) -> None:
    best = best_of(rows, config.validation)
    if best is None:
        return
    where = f", adapter in {run_dir / BEST}" if (run_dir / BEST).is_dir() else ""
    if trains_weights(run_dir) and config.validation.keep_best:
        where = f", of which `{export_line(run_dir)} --step {best.step}` makes a model"
    logger.info("best validation: %s%s", best, where)
    first = validations(rows)[0]
    _, height = decisive([first], config.validation)
    if first["step"] == 0 and height(value := first[f"validation/{best.metric}"]) > height(best.value):
        logger.warning("before the first step it was better: %s", shown(best.metric, value))


def _reward_text(rows: Sequence[Mapping[str, Any]], run_dir: Path) -> str:
    for key, what in (("kl_to_teacher/forward", "KL to the teacher"), ("nll", "loss"), ("reward", "reward")):
        if values := [row[key] for row in rows if row.get(key) is not None]:
            fifth, form = max(1, len(values) // 5), ".3f" if key == "reward" else ".2g"
            first, last = (sum(part) / fifth for part in (values[:fifth], values[-fifth:]))
            return f"mean {what} {first:{form}} in the first {fifth}, {last:{form}} in the last"
    return f"its metrics are gone ({run_dir / 'metrics.jsonl'} holds no reward)"
