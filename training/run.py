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

import gc
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PrinterCallback

from qerl.base.files import replace_text
from qerl.base.isolate import closed_at_end
from qerl.base.parallel import ALONE, Parallel, check_same
from qerl.base.program import write_given_rows
from qerl.base.versions import versions
from qerl.checkpoint.base_start import START, copy_start
from qerl.checkpoint.folder import BASE, beside, weights_digest
from qerl.checkpoint.load import local_folder
from qerl.checkpoint.resolve import ModelRef, describe, resolve_model
from qerl.config.recipe import save_config
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.plan.micro_batch_plan import MicroBatchPlan, smallest_plan
from training.parts import Given, Loaded, TrainingParts, make_parts
from training.policy.policy import Policy, build_policy
from training.policy.train_memory import plan_run, recorded_plan, warn_of_retries
from training.preflight.checks import (
    check_activations,
    check_memory,
    check_room,
    check_trackers,
    free_bytes,
    read_prompts,
    settle_qat,
    sizes_at,
    uses_card,
)
from training.preflight.plan import check_layers, check_ranks, checkpoint_bytes, trainee_of, trainer_bytes, wishes_of
from training.preflight.start import settle_start, start_to_resume
from training.rewards.rewards import rewards_of_run
from training.run_dir.checkpoint import checkpoint_step, newest_checkpoint
from training.run_dir.folder import check_shared, new_run_dir, only_writer, read_about, written
from training.run_dir.inputs import PACKAGES, Inputs, check_same_inputs, note_inputs, qat_record
from training.run_dir.log import NoLog, RunLog, read_metrics
from training.run_dir.result import TrainResult, finished, settle_best
from training.run_dir.resume import (
    NOTHING_MOVED,
    Moved,
    base_to_resume,
    check_same_base,
    config_to_resume,
    note_base_,
    prolong_,
    rewind_,
    starting_base,
)
from training.run_dir.stop import EndedError, OutOfTimeError, Stop, stop_on_signals
from training.run_dir.terminal_gone import terminal_may_go
from training.run_dir.verdict import best_of, ending
from training.trainer import QerlTrainer, trl_config

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import GRPOConfig

    from qerl.config.schema import RunConfig
    from qerl.engine.interface import Engine
    from training.loss.groups import Prompt
    from training.validate import Validation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """The folder of a run, its recipe's name, and which of its processes this is."""

    run_dir: Path
    name: str
    parallel: Parallel


@dataclass(frozen=True)
class Opened:
    """A run that was checked and opened, before anything of it is written."""

    config: RunConfig
    base: ModelRef
    place: Place
    checkpoint: Path | None  # that it continues from
    given: Given
    inputs: Inputs
    args: GRPOConfig
    loaded: Loaded

    @property
    def start_step(self) -> int:
        return checkpoint_step(self.checkpoint) if self.checkpoint else 0


def start(config: RunConfig, name: str, parallel: Parallel = ALONE) -> TrainResult:
    """Begin a new run of the recipe called `name`. Raises ConfigError if its directory is already in use."""
    run_dir = parallel.broadcast(new_run_dir(config.run.out, name) if parallel.first else None)
    check_same(parallel, {"recipe": config.model_dump()})
    config, base = settle_start(config, starting_base(config))
    config = parallel.broadcast(settle_qat(config, base, parallel.size) if parallel.first else None)
    return _train(config, base, Place(run_dir, name, parallel), checkpoint=None)


def resume(
    run_dir: Path,
    step: int | None = None,
    steps: int | None = None,
    accept_changes: bool = False,
    moved: Moved = NOTHING_MOVED,
    parallel: Parallel = ALONE,
) -> TrainResult:
    """Continue a run from its newest good checkpoint (from the beginning, if it has none), or from `step`'s; to
    `steps` in all, if that is given; with its base and files where they are now. Raises ConfigError if rows, rewards or
    packages are others than when it began, unless that is accepted."""
    config = _teacher_beside(config_to_resume(run_dir, step, steps, moved)[0], run_dir)
    if step is not None and parallel.first:
        rewind_(run_dir, step)
    checkpoint = parallel.broadcast(newest_checkpoint(run_dir) if parallel.first else None)
    check_same(parallel, {f"view of {checkpoint}": checkpoint is None or checkpoint.is_dir()})
    done = checkpoint_step(checkpoint) if checkpoint else 0
    if done >= config.run.steps:
        logger.info("%s has already finished its %d steps; --steps N with N above %d prolongs it", run_dir, done, done)
        return finished(run_dir, done, config, parallel)
    ended = ending(read_metrics(run_dir), config.validation, done) if parallel.first else None
    if step is None and steps is None and (reason := parallel.broadcast(ended)):
        logger.info("%s ended at step %d: %s; --steps N lets it go on", run_dir, done, reason)
        return finished(run_dir, done, config, parallel, ended=True)
    logger.info("resuming %s after step %d", run_dir, done)
    config, base = start_to_resume(config, base_to_resume(run_dir, config), run_dir)
    return _train(config, base, Place(run_dir, run_dir.name, parallel), checkpoint, accept_changes)


def _teacher_beside(config: RunConfig, run: Path) -> RunConfig:
    """The recipe of a run that continues, whose teacher may be named by a path from where the run was started."""
    if config.distill is None or config.distill.teacher is None:
        return config
    distill = config.distill.model_copy(update={"teacher": beside(run, config.distill.teacher)})
    return config.model_copy(update={"distill": distill})


@closed_at_end()
def _train(
    config: RunConfig, base: ModelRef, place: Place, checkpoint: Path | None, accept_changes: bool = False
) -> TrainResult:
    """Check, open, plan, train, finish. What can be refused is refused before anything heavy is loaded or written.

    The first rank holds the lock from then on, so that the run counts as running while it is opened, which can take
    minutes, and says why if it fails there.
    """
    parallel, found = place.parallel, written(place.run_dir)
    given = _check(config, base, place)
    inputs = given.inputs(config)
    agree_on_inputs(config, base, place, inputs, accept_changes)
    args = trl_config(config, place.run_dir)
    with only_writer(place.run_dir, found) if parallel.first else nullcontext():
        served = packed_base(config, base, place, given.prompts) if config.kind.packs else base
        engine = _open_engine(config, served, given) if config.kind.samples else given.opened(config, served)
        policy = policy_on(config, engine, base, parallel)
        device = policy.base_model.get_input_embeddings().weight.device
        teacher = None if given.teacher is None else given.teacher.opened(config, device)
        plan = settled_plan(config, base, place, policy, engine)
        engine.sleep()  # a resumed run loads its optimizer before its first rollout
        loaded = Loaded(engine, policy, plan, teacher)
        return _carry_out(Opened(config, base, place, checkpoint, given, inputs, args, loaded))


def _check(config: RunConfig, base: ModelRef, place: Place) -> Given:
    """Read the data, find the rewards, and raise QerlError for whatever this base, card or run directory refuses."""
    on_card = uses_card(config)
    check_trackers(config.logging.report_to)
    check_activations(config, base)
    check_ranks(config, place.parallel.size)
    sizes = sizes_at(base)
    check_same_base(place.run_dir, base.base)
    check_layers(config, sizes.decoder)
    check_room(place.run_dir, checkpoint_bytes(config, sizes))
    if on_card:
        check_memory(config, base, free_bytes(), place.parallel.size)
    if not config.kind.samples:
        from training.sft_step import GivenRows

        return GivenRows.read(config, base, place.parallel)
    tokenizer, prompts, environments = read_prompts(config, base)
    rewards = rewards_of_run(config, prompts, place.run_dir, environments.columns if environments else ())
    questions = None
    if config.validation.every is not None:
        from training.validation.questions import read_questions

        questions = read_questions(config, tokenizer, prompts, sizes, place.run_dir, environments)
    teacher = None
    if config.distill is not None:
        from training.policy.teacher import find_teacher

        teacher = find_teacher(config, base, tokenizer, sizes)
    return Given(tokenizer, prompts, rewards, place.parallel, questions, environments, teacher)


def agree_on_inputs(config: RunConfig, base: ModelRef, place: Place, inputs: Inputs, accept_changes: bool) -> None:
    """Raise QerlError if ranks were given different things, or other things than when the run began."""
    parallel = place.parallel
    if parallel.size > 1:
        facts = {"recipe": config.model_dump(), **inputs, "version of a package": versions(PACKAGES)}
        check_same(parallel, {**facts, "base": weights_digest(local_folder(base.base))})
    if parallel.first:
        check_same_inputs(place.run_dir, inputs, accept_changes)


def packed_base(config: RunConfig, base: ModelRef, place: Place, prompts: Sequence[Prompt]) -> ModelRef:
    """The packed base of a run that trains whole weights, which the first rank makes."""
    check_shared(place.run_dir, place.parallel)
    if place.parallel.first:
        from training.run_dir.start_base import start_base

        start_base(config, base, place.run_dir, prompts)
    place.parallel.barrier()
    return resolve_model(str(place.run_dir / BASE))


def policy_on(config: RunConfig, engine: Engine, base: ModelRef, parallel: Parallel) -> Policy:
    """What the recipe trains, on the model of an open engine."""
    if not config.kind.packs:
        policy = build_policy(engine, base, config.adapter, config.run.seed)
    else:
        from training.policy.weights import build_packed_in_policy, build_weights_policy

        if config.kind.has_adapter:
            policy = build_packed_in_policy(engine, base, config)
        else:
            policy = build_weights_policy(engine, base, config, sizes_at(base), parallel)
    if config.train.fp8_recipe is not None:
        from training.policy.rounding import round_products_

        round_products_(policy.base_model, config.train)
    return policy


def _open_engine(config: RunConfig, served: ModelRef, given: Given) -> Engine:
    context = given.questions.context if given.questions else 0
    engine = open_rollout_engine(config, served, context, given.parallel.size)
    logger.info("%s; engine %s (%s)", describe(served), engine.name, engine.kernel)
    return engine


def open_rollout_engine(config: RunConfig, base: ModelRef, context: int = 0, ranks: int = 1) -> Engine:
    """The engine that the recipe asks for, over the base that was resolved, with room for `context` tokens at least.

    It is one of `ranks`.
    """
    options = engine_options(config, trainer_bytes(config, sizes_at(base), ranks))
    frozen = base.start if config.adapter.start == "frozen" else None
    options = replace(options, max_context=max(options.max_context, context), start=frozen)
    return open_engine(base.base, base.format, options)


def engine_options(config: RunConfig, kept_bytes: int) -> EngineOptions:
    """The engine that a recipe asks for; `kept_bytes` is what the trainer keeps on the card during a rollout."""
    rollout = config.rollout
    return EngineOptions(
        engine=rollout.engine,
        trust_remote_code=config.model.trust_remote_code,
        records_experts=rollout.router_replay,
        # An extra rollout of dynamic sampling can be larger than the step.
        batch_size=rollout.prompts_per_step * rollout.group_size,
        kernel=rollout.kernel,
        memory=rollout.memory,
        cap_gib=config.memory.cap_gib,
        trainer_bytes=kept_bytes,
        deterministic=rollout.deterministic,
        kv_cache_dtype=rollout.kv_cache_dtype,
        max_context=config.data.max_prompt_tokens + config.longest_completion,
        max_rank=trainee_of(config).engine_rank,
        experts=config.adapter.experts,
        expert_rank=trainee_of(config).engine_expert_rank,
        seed=config.run.seed,
    )


def settled_plan(config: RunConfig, base: ModelRef, place: Place, policy: Policy, engine: Engine) -> MicroBatchPlan:
    """The plan that the run began with, or a new one by the memory that is free now; of ranks the smallest."""
    parallel = place.parallel
    plan = recorded_plan(read_about(place.run_dir), config.run.micro_batch_tokens) if parallel.first else None
    if (plan := parallel.broadcast(plan)) is not None:
        return plan
    entropy, cap = config.loss.entropy_coef > 0, config.memory.cap_gib
    own = plan_run(policy, engine, wishes_of(config, sizes_at(base)), trainee_of(config).acting_rank, entropy, cap)
    return smallest_plan(parallel.gather(own))


def _carry_out(run: Opened) -> TrainResult:
    """Train in the run's directory, and finish it."""
    config, given, run_dir, parallel = run.config, run.given, run.place.run_dir, run.place.parallel
    with (
        _log(run) as (log, trackers),
        stop_on_signals(config.run, config.loss.num_iterations, run_dir, parallel) as stop,
    ):
        if parallel.first:
            _open_run_dir(run)
            note_inputs(run_dir, run.inputs, run.start_step)
            prolong_(run_dir, config, run.start_step)
            note_base_(run_dir, config, run.base.base)
        log.start_at(run.start_step)
        if parallel.first:
            settle_best(run_dir, best_of(log.validations, config.validation), config.kind.has_adapter)
        parts = make_parts(config, given, run.loaded, log)
        validation = _validation(parts, stop)
        trainer = QerlTrainer(parts, run.args, [stop, *trackers], run.start_step, validation)
        trainer.remove_callback(PrinterCallback)
        with opened_set_aside():
            steps = train_until_stopped(trainer, stop, run.checkpoint)
        if not stop.abandoned:  # else the engine may be in the midst of a rollout, and there is no time
            warn_of_retries()
            parts.clear_noise()
            run.loaded.engine.close()
        ended = validation is not None and validation.ended(steps)
        return replace(finished(run_dir, steps, config, parallel, ended), stopped_by=stop.asked)


def _validation(parts: TrainingParts, stop: Stop) -> Validation | None:
    if not parts.validates:
        return None
    from training.validate import Validation

    return Validation(parts, stop)


def train_until_stopped(trainer: QerlTrainer, stop: Stop, checkpoint: Path | None) -> int:
    """Train from `checkpoint`; returns the step that the run has reached and saved."""
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except OutOfTimeError:
        return stop.save_abandoned(trainer.state, trainer.save_now, trainer.parts.policy.shards is not None)
    except EndedError:
        pass
    return trainer.state.global_step


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
def _log(run: Opened) -> Iterator[tuple[RunLog, list[TrainerCallback]]]:
    """The run's log and its trackers, of which only the first rank writes."""
    run_dir, config, steps = run.place.run_dir, run.config, run.config.run.steps
    if not run.place.parallel.first:
        yield NoLog(run_dir, steps), []
        return
    with (
        terminal_may_go(run_dir),
        _trackers(run) as trackers,
        RunLog(run_dir, steps, report_to=config.logging.report_to) as log,
    ):
        yield log, trackers


def _trackers(run: Opened) -> AbstractContextManager[list[TrainerCallback]]:
    if not run.config.logging.report_to:
        return nullcontext([])
    from training.run_dir.trackers import open_trackers

    return open_trackers(run.config, run.place.run_dir, run.start_step)


def _open_run_dir(run: Opened) -> None:
    """Create the directory, or what a kill kept from being made. With config.yaml a run can resume, and only the rows
    that a program gave come before it."""
    config, base, run_dir = run.config, run.base, run.place.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    write_given_rows(run_dir)
    begun = (run_dir / "config.yaml").exists()
    if not begun:  # a run that was killed here may have left the start of another base
        shutil.rmtree(run_dir / START, ignore_errors=True)
    if base.start is not None and not (run_dir / START).exists():
        copy_start(base.start, run_dir / START, config.adapter.start)
    if not begun:
        save_config(config, run_dir / "config.yaml")
    (run_dir / "metrics.jsonl").touch()
    if not (run_dir / "run.json").exists():
        about = {"recipe": run.place.name, "base": base.base, "command": sys.argv, "versions": versions(PACKAGES)}
        about |= {"inputs": dict(run.inputs), "on_adapter": base.adapter is not None}
        about |= {"weights": weights_digest(local_folder(base.base)), "micro_batches": asdict(run.loaded.plan)}
        about |= {"kind": config.kind.model_dump(), "qat": qat_record(config.qat)}
        replace_text(run_dir / "run.json", json.dumps(about, indent=1))
    logger.info("writing to %s", run_dir)
