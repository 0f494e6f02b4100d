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

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from qerl.base.parallel import ALONE, Parallel, check_same
from qerl.checkpoint.adapter_file import BASE
from qerl.checkpoint.resolve import ModelRef, describe, resolve_model, starting_model, teacher_beside
from qerl.config.schema import RunConfig
from qerl.engine.interface import Engine
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.plan.advice import check_ranks
from qerl.plan.plan import checkpoint_bytes, trainer_bytes
from qerl.plan.trained import engine_expert_rank, engine_rank
from training.course import Course, Place, TrainResult, agree_on_inputs, carry_out, finished, settled_plan
from training.distill.teacher import find_teacher, open_teacher
from training.parts import Given, make_parts
from training.policy.build import build_packed_in_policy, build_policy, build_weights_policy, round_products_
from training.policy.policy import Policy
from training.policy.start_base import start_base
from training.preflight.checks import (
    check_activations,
    check_engine,
    check_memory,
    check_room,
    check_trackers,
    free_bytes,
    read_prompts,
    settle_qat,
    sizes_at,
)
from training.preflight.start import settle_start, start_to_resume
from training.rewards.rewards import rewards_of_run
from training.rollout.groups import Prompt
from training.run_dir.checkpoint import checkpoint_step, newest_checkpoint
from training.run_dir.folder import check_shared, new_run_dir, written
from training.run_dir.inputs import inputs_of_run
from training.run_dir.log import RunLog, read_metrics
from training.run_dir.resume import (
    base_to_resume,
    check_same_base,
    config_to_resume,
    rewind_,
)
from training.run_dir.stop import Stop
from training.trainer import QerlTrainer
from training.trl_config import check_installed, trl_config
from training.validation.questions import read_questions
from training.validation.validation import Validation, measure
from training.validation.verdict import ending

logger = logging.getLogger(__name__)


def start(config: RunConfig, name: str, parallel: Parallel = ALONE) -> TrainResult:
    """Begin a new run of the recipe called `name`. Raises ConfigError if its directory is already in use."""
    run_dir = parallel.broadcast(new_run_dir(config.run.out, name) if parallel.first else None)
    check_same(parallel, {"recipe": config.model_dump()})
    config, base = settle_start(config, starting_model(config))
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
        return finished(run_dir, done, config, parallel)
    ended = ending(read_metrics(run_dir), config.validation, done) if parallel.first else None
    if step is None and steps is None and (reason := parallel.broadcast(ended)):
        logger.info("%s ended at step %d: %s; --steps N lets it go on", run_dir, done, reason)
        return finished(run_dir, done, config, parallel, ended=True)
    logger.info("resuming %s after step %d", run_dir, done)
    config, base = start_to_resume(config, base_to_resume(run_dir, config), run_dir)
    return _train(config, base, Place(run_dir, run_dir.name, parallel), checkpoint, accept_changes)


def _train(
    config: RunConfig, base: ModelRef, place: Place, checkpoint: Path | None, accept_changes: bool = False
) -> TrainResult:
    """Check, open, plan, train, finish. What can be refused is refused before anything heavy is loaded or written."""
    if config.sft is not None:
        from training.sft.run import train_on_rows

        return train_on_rows(config, base, place, checkpoint, accept_changes)
    run_dir, parallel = place.run_dir, place.parallel
    found = written(run_dir)
    given = _check(config, base, place)
    validated = given.questions.prompts if given.questions else ()
    files = given.environments.runner.files if given.environments else ()
    inputs = inputs_of_run(config, given.prompts, validated, files)
    inputs |= given.teacher.inputs() if given.teacher else {}
    agree_on_inputs(config, base, place, inputs, accept_changes)
    served = base if config.qat is None else packed_base(config, base, place, given.prompts)
    context = given.questions.context if given.questions else 0
    engine = open_rollout_engine(config, served, context, parallel.size)
    logger.info("%s; engine %s (%s)", describe(served), engine.name, engine.kernel)
    policy = policy_on(config, engine, base, parallel)
    teacher = open_teacher(config, given.teacher, policy.base_model.get_input_embeddings().weight.device)
    args = trl_config(config, run_dir, given.rewards.weights)  # what it refuses is refused before anything is written
    if not parallel.first:
        args.report_to = []
    plan = settled_plan(config, base, place, policy, engine)
    engine.sleep()  # a resumed run loads its optimizer before its first rollout
    course = Course(config, base, place, checkpoint, found, inputs, plan)

    def begin(log: RunLog, stop: Stop) -> QerlTrainer:
        parts = replace(make_parts(config, given, engine, policy, plan, log), teacher=teacher)
        measured = given.questions and partial(measure, parts, given.questions)
        validation = Validation(parts, measured, stop) if measured else None
        return QerlTrainer(parts, args, [stop], course.start_step, validation)

    def close(trainer: QerlTrainer, abandoned: bool) -> None:
        if not abandoned:  # else the engine may be in the midst of a rollout, and there is no time
            trainer.parts.sampler.clear_noise()
            engine.close()
        if given.environments is not None:
            given.environments.close()

    return carry_out(course, begin, close)


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
    rewards = rewards_of_run(config, prompts, place.run_dir, environments.columns if environments else ())
    questions = read_questions(config, tokenizer, prompts, sizes_at(base), place.run_dir, environments)
    teacher = find_teacher(config, base, tokenizer, sizes_at(base))
    return Given(tokenizer, prompts, rewards, place.parallel, questions, environments, teacher)


def packed_base(config: RunConfig, base: ModelRef, place: Place, prompts: Sequence[Prompt]) -> ModelRef:
    """The packed base of a run that trains whole weights, which the first rank makes."""
    check_shared(place.run_dir, place.parallel)
    if place.parallel.first:
        start_base(config, base, place.run_dir, prompts)
    place.parallel.barrier()
    return resolve_model(str(place.run_dir / BASE))


def policy_on(config: RunConfig, engine: Engine, base: ModelRef, parallel: Parallel) -> Policy:
    """What the recipe trains, on the model of an open engine."""
    if config.qat is None:
        policy = build_policy(engine, base, config.adapter, config.run.seed)
    elif config.qat.mode == "adapter":
        policy = build_packed_in_policy(engine, base, config)
    else:
        policy = build_weights_policy(engine, base, config, sizes_at(base), parallel)
    round_products_(policy.base_model, config.train)
    return policy


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
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        records_experts=rollout.router_replay,
        # An extra rollout of dynamic sampling can be larger than the step.
        batch_size=rollout.batch_size or rollout.prompts_per_step * rollout.group_size,
        kernel=rollout.kernel,
        memory=rollout.memory,
        cap_gib=config.memory.cap_gib,
        trainer_bytes=kept_bytes,
        deterministic=rollout.deterministic,
        tune_kernels=rollout.tune_kernels,
        kv_cache_dtype=rollout.kv_cache_dtype,
        calibrates_kv=rollout.calibrates_kv,
        max_context=config.data.max_prompt_tokens + config.longest_completion,
        max_rank=engine_rank(config),
        experts=config.adapter.experts,
        expert_rank=engine_expert_rank(config),
        seed=config.run.seed,
    )
