"""Train: recipe -> run directory. What `qerl train` calls, in the order in which it happens.

runs/<name>/
    config.yaml         the resolved recipe            run.json      versions, recipe, base, command
    metrics.jsonl       one line per step              completions/  samples of what was written
    checkpoints/        to resume from                 adapter/      the result, a standard PEFT folder
    base/, model/       of a run through the quantizer: the packed base, and the result (no adapter/ of whole weights)
    best/               the adapter of the best validation; only if the recipe validates
    warnings.jsonl      what was wrong, in words; only if something was
    terminal.log        what was shown after the terminal had gone; only if it had
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PrinterCallback

from qerl.checkpoint.load import local_folder
from qerl.checkpoint.resolve import ModelRef, describe, resolve_model
from qerl.checkpoint.start import starting_model
from qerl.checkpoint.teacher import teacher_beside
from qerl.checkpoint.weights_digest import weights_digest
from qerl.checkpoint.weights_run import BASE, export_line, trains_weights
from qerl.config.recipe import save_config
from qerl.config.schema import RunConfig
from qerl.engine.interface import Engine
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.files.disk import replace_text
from qerl.own.given import write_given_rows
from qerl.parallel import ALONE, Parallel, check_same
from qerl.plan.micro_batch_plan import MicroBatchPlan, smallest_plan
from qerl.plan.plan import checkpoint_bytes, trainer_bytes, wishes_of
from qerl.plan.several import check_ranks
from qerl.plan.trained import adapter_rank, trains_masters
from qerl.report.sampling import sampling_text
from qerl.tasks import task_of
from training.distill.teacher import find_teacher, open_teacher
from training.parts import Given, make_parts
from training.policy.build import build_packed_in_policy, build_policy, build_weights_policy
from training.policy.policy import Policy
from training.policy.start_base import start_base
from training.policy.train_memory import as_record, plan_run, recorded_plan, warn_of_retries
from training.preflight.activations import check_activations
from training.preflight.checks import (
    check_engine,
    check_memory,
    check_room,
    free_bytes,
    read_prompts,
    settle_qat,
    sizes_at,
)
from training.preflight.trackers import check_trackers
from training.rewards.rewards import build_rewards, fixed_columns
from training.rollout.groups import Prompt
from training.run_dir.checkpoint import checkpoint_step, newest_checkpoint
from training.run_dir.folder import check_shared, new_run_dir, only_writer, written
from training.run_dir.inputs import Inputs, check_same_inputs, inputs_of, note_inputs, versions
from training.run_dir.log import NoLog, RunLog, read_metrics
from training.run_dir.model import settle_model
from training.run_dir.result import ADAPTER, BEST, settle_best, settle_result
from training.run_dir.resume import (
    base_to_resume,
    check_same_base,
    config_to_resume,
    note_base_,
    prolong_,
    rewind_,
)
from training.run_dir.stop import stop_on_signals, train_until_stopped
from training.run_dir.terminal_gone import terminal_may_go
from training.run_dir.trackers import open_trackers
from training.trainer import QerlTrainer
from training.trl_config import check_installed, trl_config
from training.validation.questions import read_questions
from training.validation.validation import Validation
from training.validation.verdict import best_kept, best_of, ending, shown, validations

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


def start(config: RunConfig, name: str, parallel: Parallel = ALONE) -> TrainResult:
    """Begin a new run of the recipe called `name`. Raises ConfigError if its directory is already in use."""
    run_dir = parallel.broadcast(new_run_dir(config.run.out, name) if parallel.first else None)
    check_same(parallel, {"recipe": config.model_dump()})
    base = starting_model(config)
    config = parallel.broadcast(settle_qat(config, base, parallel.size) if parallel.first else None)
    return _train(config, base, Place(run_dir, name, parallel), checkpoint=None)


def resume(
    run_dir: Path,
    step: int | None = None,
    steps: int | None = None,
    accept_changes: bool = False,
    model: str | None = None,
    parallel: Parallel = ALONE,
) -> TrainResult:
    """Continue a run from its newest good checkpoint (from the beginning, if it has none), or from that of `step`; to
    `steps` in all, if that is given; on its base at `model`, if that has moved. Raises ConfigError if rows, rewards or
    packages are others than when it began, unless that is accepted."""
    config = teacher_beside(config_to_resume(run_dir, step, steps, model)[0], run_dir)
    if step is not None and parallel.first:
        rewind_(run_dir, step)
    checkpoint = parallel.broadcast(newest_checkpoint(run_dir) if parallel.first else None)
    check_same(parallel, {f"view of {checkpoint}": checkpoint is None or checkpoint.is_dir()})
    done = checkpoint_step(checkpoint) if checkpoint else 0
    if done >= config.run.steps:
        logger.info("%s has already finished its %d steps; --steps N with N above %d prolongs it", run_dir, done, done)
        return _finished(run_dir, done, config, parallel)
    ended = ending(read_metrics(run_dir), config.validation, done) if parallel.first else None
    if step is None and steps is None and (reason := parallel.broadcast(ended)):
        logger.info("%s ended at step %d: %s; --steps N lets it go on", run_dir, done, reason)
        return _finished(run_dir, done, config, parallel, ended=True)
    logger.info("resuming %s after step %d", run_dir, done)
    base = base_to_resume(run_dir, config)
    return _train(config, base, Place(run_dir, run_dir.name, parallel), checkpoint, accept_changes)


def _train(
    config: RunConfig, base: ModelRef, place: Place, checkpoint: Path | None, accept_changes: bool = False
) -> TrainResult:
    """Check, open, plan, train, finish. What can be refused is refused before anything heavy is loaded or written."""
    run_dir, parallel = place.run_dir, place.parallel
    found = written(run_dir)
    given = _check(config, base, place)
    validated = given.questions.prompts if given.questions else ()
    files = given.environments.runner.files if given.environments else ()
    inputs = inputs_of(given.prompts, task_of(config.data), config.rewards, validated, files)
    inputs |= given.teacher.inputs() if given.teacher else {}
    if parallel.size > 1:
        facts = {"recipe": config.model_dump(), **inputs, "version of a package": versions()}
        check_same(parallel, {**facts, "base": weights_digest(local_folder(base.base))})
    if parallel.first:
        check_same_inputs(run_dir, inputs, accept_changes)
    served = base if config.qat is None else _packed_base(config, base, place, given.prompts)
    context = given.questions.context if given.questions else 0
    engine = open_rollout_engine(config, served, context, parallel.size)
    logger.info("%s; engine %s (%s)", describe(served), engine.name, engine.kernel)
    policy = _policy(config, engine, base, parallel)
    teacher = open_teacher(config, given.teacher, policy.base_model.get_input_embeddings().weight.device)
    args = trl_config(config, run_dir, given.rewards.weights)  # what it refuses is refused before anything is written
    if not parallel.first:
        args.report_to = []
    plan = recorded_plan(run_dir, config.run.micro_batch_tokens) if parallel.first else None
    if (plan := parallel.broadcast(plan)) is None:
        entropy, cap = config.loss.entropy_coef > 0, config.memory.cap_gib
        own = plan_run(policy, engine, wishes_of(config, sizes_at(base)), adapter_rank(config), entropy, cap)
        plan = smallest_plan(parallel.gather(own))
    engine.sleep()  # a resumed run loads its optimizer before its first rollout
    start_step = checkpoint_step(checkpoint) if checkpoint else 0
    with (
        _log(place, config, found, start_step) as log,
        stop_on_signals(config.run, config.loss.num_iterations, run_dir, parallel) as stop,
    ):
        if parallel.first:
            _open_run_dir(place, config, base, plan, inputs)
            note_inputs(run_dir, inputs, start_step)
            prolong_(run_dir, config, start_step)
            note_base_(run_dir, config, base.base)
        log.start_at(start_step)
        if parallel.first:
            settle_best(run_dir, best_kept(log.validations, config.validation))
        parts = replace(make_parts(config, given, engine, policy, plan, log), teacher=teacher)
        validation = Validation(parts, given.questions, stop) if given.questions else None
        trainer = QerlTrainer(parts, args, [stop], start_step, validation)
        trainer.remove_callback(PrinterCallback)
        steps = train_until_stopped(trainer, stop, checkpoint)
        if not stop.abandoned:  # else the engine may be in the midst of a rollout, and there is no time
            warn_of_retries()
            parts.sampler.clear_noise()
            engine.close()
        if given.environments is not None:
            given.environments.close()
        ended = validation is not None and validation.ended(steps)
        return replace(_finished(run_dir, steps, config, parallel, ended), stopped_by=stop.asked)


def _check(config: RunConfig, base: ModelRef, place: Place) -> Given:
    """Read the data, find the rewards, and raise QerlError for whatever this base, card or run directory refuses."""
    engine_name = check_engine(config)
    check_installed(config)
    check_trackers(config.logging.report_to)
    check_activations(config, base)
    check_ranks(config, place.parallel.size)
    tokenizer, prompts, environments = read_prompts(config, base)
    check_same_base(place.run_dir, base.base)
    check_room(place.run_dir, checkpoint_bytes(config, sizes_at(base)))
    if engine_name == "vllm":
        check_memory(config, base, free_bytes(), place.parallel.size)
    fixed = fixed_columns(task_of(config.data), config.rollout.max_new_tokens)
    examples = [prompt.example for prompt in prompts]
    rewards = build_rewards(config.rewards, fixed, examples, place.run_dir, environments is not None)
    questions = read_questions(config, tokenizer, prompts, sizes_at(base), place.run_dir, environments)
    teacher = find_teacher(config, base, tokenizer, sizes_at(base))
    return Given(tokenizer, prompts, rewards, place.parallel, questions, environments, teacher)


def _packed_base(config: RunConfig, base: ModelRef, place: Place, prompts: Sequence[Prompt]) -> ModelRef:
    """The packed base of a run that trains whole weights, which the first rank makes."""
    check_shared(place.run_dir, place.parallel)
    if place.parallel.first:
        start_base(config, base, place.run_dir, prompts)
    place.parallel.barrier()
    return resolve_model(str(place.run_dir / BASE))


def _policy(config: RunConfig, engine: Engine, base: ModelRef, parallel: Parallel) -> Policy:
    if config.qat is None:
        return build_policy(engine, base, config.adapter, config.run.seed)
    if config.qat.mode == "adapter":
        return build_packed_in_policy(engine, base, config)
    return build_weights_policy(engine, base, config, sizes_at(base), parallel)


def open_rollout_engine(config: RunConfig, base: ModelRef, context: int = 0, ranks: int = 1) -> Engine:
    """The engine that the recipe asks for, over the base that was resolved, with room for `context` tokens at least.

    It is one of `ranks`.
    """
    options = EngineOptions.of_recipe(config, trainer_bytes(config, sizes_at(base), ranks))
    options = replace(options, max_context=max(options.max_context, context))
    return open_engine(base.base, base.format, options)


@contextmanager
def _log(place: Place, config: RunConfig, found: list[str], start_step: int) -> Iterator[RunLog]:
    """The run's log, with the trackers, of which only the first rank writes; it holds the lock of the run directory."""
    run_dir, steps = place.run_dir, config.run.steps
    if not place.parallel.first:
        yield NoLog(run_dir, steps)
        return
    with (
        only_writer(run_dir, found),
        terminal_may_go(run_dir),
        open_trackers(config, run_dir, start_step) as trackers,
        RunLog(run_dir, steps, trackers=trackers) as log,
    ):
        yield log


def _open_run_dir(place: Place, config: RunConfig, base: ModelRef, plan: MicroBatchPlan, inputs: Inputs) -> None:
    """Create the directory, or what a kill kept from being made. With config.yaml a run can resume, and only the rows
    that a program gave come before it."""
    run_dir = place.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    write_given_rows(run_dir)
    if not (run_dir / "config.yaml").exists():
        save_config(config, run_dir / "config.yaml")
    (run_dir / "metrics.jsonl").touch()
    if not (run_dir / "run.json").exists():
        about = {"recipe": place.name, "base": base.base, "command": sys.argv, "versions": versions()}
        about |= {"inputs": dict(inputs), "on_adapter": base.adapter is not None}
        about |= {"weights": weights_digest(local_folder(base.base)), "micro_batches": as_record(plan)}
        replace_text(run_dir / "run.json", json.dumps(about, indent=1))
    logger.info("writing to %s", run_dir)


def _finished(run_dir: Path, steps: int, config: RunConfig, parallel: Parallel, ended: bool = False) -> TrainResult:
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
    if first["step"] == 0 and (value := first[f"validation/{best.metric}"]) > best.value:
        logger.warning("before the first step it was better: %s", shown(best.metric, value))


def _reward_text(rows: Sequence[Mapping[str, Any]], run_dir: Path) -> str:
    for key, what in (("kl_to_teacher/forward", "KL to the teacher"), ("reward", "reward")):
        if values := [row[key] for row in rows if row.get(key) is not None]:
            fifth, form = max(1, len(values) // 5), ".3f" if key == "reward" else ".2g"
            first, last = (sum(part) / fifth for part in (values[:fifth], values[-fifth:]))
            return f"mean {what} {first:{form}} in the first {fifth}, {last:{form}} in the last"
    return f"its metrics are gone ({run_dir / 'metrics.jsonl'} holds no reward)"
