"""Evaluate a model on a task: `run_eval(EvalSettings(task="gsm8k", model="runs/a")).summary.accuracy.value`.

    plan (eval/plan.py) -> engine + adapter -> completions -> grades -> folder and summary (eval/result.py)

Questions are read, asked and graded by the functions of a training step and its validations; the only reward is the
task's grading. `run_checkpoints` evaluates several checkpoints of one run: the base is loaded once, and the adapters
are exchanged (`qerl eval gsm8k --run runs/a --checkpoints all`, or `last`, or steps: `40,80`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.plan import Plan, episode_fields, make_plan, part_seed
from eval.result import EvalResult, Key, Row, Store, open_store, summarize
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import no_folder
from qerl.base.isolate import closed_at_end
from qerl.base.parallel import ALONE, Parallel, check_same
from qerl.base.versions import versions
from qerl.checkpoint.folder import checkpoints_of, export_line, kind_of, kind_of_run
from qerl.checkpoint.load import text_of_engine
from qerl.checkpoint.resolve import describe
from qerl.config.schema import RewardConfig
from qerl.data.grading.grade import Grade, grade_many
from qerl.data.tasks import Task
from qerl.engine.interface import Engine
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.update import AdapterUpdate, deliver
from training.rewards.rewards import GuardedReward, Rewards, Rows, fixed_columns

if TYPE_CHECKING:
    import torch

    from training.loss.groups import GradedGroup


class TaskGrading(GuardedReward):
    """The task's grading as the only reward of an evaluation, which keeps the whole `grades`."""

    limit = "--grader-timeout-s"
    then = (  # a corrected file is another grader, and an evaluation has one
        "; correct it, and the same command goes on; where completions are saved already, add --overwrite, or grade "
        "those with `qerl grade`"
    )

    def __init__(self, plan: Plan) -> None:
        fixed = fixed_columns(plan.task, plan.sampling.max_new_tokens)
        rows = Rows([prompt.example for prompt in plan.prompts])
        accuracy = RewardConfig(name="accuracy", timeout_s=plan.task.grader_timeout_s)
        super().__init__("accuracy", accuracy, self._grade, fixed, rows, plan.out)
        self.grades: list[Grade] = []

    def _grade(self, completions: Sequence[str], answer: Any, question: Any, task: Task, **columns: Any) -> list[float]:
        self.grades = grade_many(task, completions, answer, question, columns)
        return [grade.value for grade in self.grades]

    def _shown(self, what: str, columns: Mapping[str, list[Any]], index: int | None, fixed: Mapping[str, Any]) -> str:
        """Nothing is saved: the folder of an evaluation holds what the same command goes on from."""
        if index is None:
            return ""
        row = self._examples[columns["row"][index]].id
        return f" for the completion {columns['completions'][index][:60]!r} of row {row}"


logger = logging.getLogger(__name__)

LOG_EVERY_S = 20.0
# Settings that say which evaluations to run, or that are recorded in what they decide.
UNRECORDED = ("overwrite", "sampled", "run", "checkpoints", "suite", "suite_tasks")

OnBatch = Callable[[int, int, int], None]  # (completions done, completions in all, correct so far)


class EngineHolder:
    """Keeps one engine open for several evaluations: the next one on the same base only brings its adapter."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._key: object = None

    def take(self, plan: Plan) -> Engine:
        """The plan's engine with its adapter acting. Raises CheckpointError or EngineError."""
        from qerl.checkpoint.adapter import read_fitting_adapter

        adapter = None if plan.ref.adapter is None else read_fitting_adapter(plan.ref.adapter, plan.ref.base)
        options = engine_options(plan, adapter and adapter[0])
        key = (plan.ref.base, plan.ref.format, options, adapter is None)
        if self.engine is None or key != self._key:
            self.close()
            self.engine, self._key = open_engine(plan.ref.base, plan.ref.format, options), key
            logger.info("engine %s, %s", self.engine.name, self.engine.kernel)
        if adapter is not None:
            count = deliver(AdapterUpdate(*adapter), self.engine)
            logger.info("adapter %s: %d tensors are in the engine", plan.ref.adapter, count)
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None


@closed_at_end()
def run_eval(
    settings: EvalSettings,
    on_batch: OnBatch | None = None,
    holder: EngineHolder | None = None,
    parallel: Parallel = ALONE,
) -> EvalResult:
    """Run or continue an evaluation and write its folder. A finished one is read and not run again.

    `on_batch` is called at the start and after each batch; without it progress is logged. `holder` keeps the engine
    open for the caller's next evaluation; without it the engine is closed at the end. Several processes sample a share
    of each batch; the first one writes, and all return the result. Raises QerlError of the kind that
    fits, with what to write instead.
    """
    plan = make_plan(settings)
    if plan.environment is not None and parallel.size > 1:
        raise ConfigError("environments are played by one process: leave out --gpus")
    check_same(parallel, plan.identity)
    on_batch = on_batch or _Log()
    with _store(plan, parallel) as store:
        rows = parallel.broadcast(store.resume(plan.batches) if store else [])
        missing = sum(map(len, plan.batches)) - len(rows)
        if rows:
            logger.info("%s holds %d completions; %d are missing", plan.out, len(rows), missing)
            if plan.given:
                logger.warning(
                    "of %s only its own text is compared with what graded these: if a variable or a module that it "
                    "reads has changed since, add overwrite=True",
                    ", ".join(plan.given),
                )
        if missing:
            own = holder or EngineHolder()
            try:
                engine = own.take(plan)
                facts = {"name": engine.name, "kernel": engine.kernel, "versions": versions()}
                check_same(parallel, {"engine": facts})
                if store:
                    store.bind_engine(facts)
                complete(plan, engine, store, rows, on_batch, parallel)
            finally:
                if own is not holder:
                    own.close()
        result = parallel.broadcast(_result(plan, store, rows) if store else None)
        if store:
            store.finish(result.to_json())
    return result


@contextlib.contextmanager
def _store(plan: Plan, parallel: Parallel) -> Iterator[Store | None]:
    """The evaluation's folder, which the first process holds."""
    if not parallel.first:
        yield None
        return
    with open_store(plan.out, plan.identity, plan.settings.overwrite) as store:
        yield store


def engine_options(plan: Plan, adapter: Mapping[str, torch.Tensor] | None) -> EngineOptions:
    """The options of an evaluation's engine; `adapter` are the tensors of the adapter that it will get."""
    context = max(len(prompt.ids) for prompt in plan.prompts) + plan.sampling.max_new_tokens
    options = replace(plan.settings.engine_options(), max_context=context, start=plan.ref.start)
    return options if adapter is None else options.for_adapter(adapter)


def complete(
    plan: Plan, engine: Engine, store: Store | None, rows: list[Row], on_batch: OnBatch, parallel: Parallel = ALONE
) -> None:
    """Ask and grade the batches that `rows` lacks, and append them to `rows` and to the store, if it is here.

    Each process takes its share of every batch, so that what is saved does not depend on how many there are.
    """
    total, step = sum(map(len, plan.batches)), plan.settings.step or 0
    decode = text_of_engine(plan.tokenizer, engine).batch
    on_batch(len(rows), total, _correct(rows))
    from training.rewards.grading import Grader  # it imports torch

    done = 0
    for number, batch in enumerate(plan.batches):
        done += len(batch)
        if done <= len(rows):
            continue
        start = time.perf_counter()
        share = parallel.span(len(batch))
        prompts = [plan.prompts[row] for row, _ in batch[share]]
        groups = plan.asking.groups(engine, prompts, part_seed(plan.settings.seed, number), share.start)
        grading = TaskGrading(plan)
        graded = Grader(Rewards([grading], [1.0]), decode, mask_truncated=False).grade(groups, step, steps_done=step)
        own = [
            row_of(key, one, grade, number)
            for key, one, grade in zip(batch[share], graded.groups, grading.grades, strict=True)
        ]
        graded_rows = [row for part in parallel.gather(own) for row in part]
        seconds = round(time.perf_counter() - start, 3)
        graded_rows = [{**row, "batch_seconds": seconds} for row in graded_rows]
        if store:
            store.append(graded_rows)
        rows += graded_rows
        on_batch(len(rows), total, _correct(rows))


def row_of(key: Key, graded: GradedGroup, grade: Grade, batch: int) -> Row:
    """What is saved of one completion. Of an episode the model's last turn was graded."""
    prompt, (sample,), (text,) = graded.group.prompt, graded.group.samples, graded.texts
    return {
        "row": prompt.row,
        "id": prompt.example.id,
        "sample": key[1],
        "question": prompt.example.question,
        "answer": prompt.example.answer,
        "completion": text,
        "prompt_tokens": len(prompt.ids),
        "tokens": sample.written,
        "truncated": sample.truncated,
        "extracted": grade.extracted,
        "correct": grade.correct,
        "reason": grade.reason,
        **({} if grade.score is None else {"score": grade.score}),
        **({} if sample.episode is None else episode_fields(sample.episode)),
        "batch": batch,
    }


def _result(plan: Plan, store: Store, rows: Sequence[Row]) -> EvalResult:
    ref = plan.ref
    settings = {name: value for name, value in asdict(plan.settings).items() if name not in UNRECORDED}
    details = {
        "step": plan.settings.step,
        "base": ref.base,
        "adapter": None if ref.adapter is None else str(ref.adapter),
        "format": ref.format,
        "data": {**asdict(plan.dropped), "dropped": plan.dropped.dropped},
        "system_prompt": plan.task.system_prompt,
        "prompt_template": plan.task.prompt_template,
        "settings": {**settings, "out": str(plan.out), "pass_k": list(plan.settings.pass_k)},
        "sampling": asdict(plan.sampling),
        "engine": store.engine,
        "identity": plan.identity,
    }
    return EvalResult(plan.task.name, describe(ref), plan.out, summarize(rows, plan.settings.pass_k), details)


def _correct(rows: Sequence[Row]) -> int:
    return sum(row["correct"] for row in rows)


class _Log:
    """Logs progress: at the start, at the end, and every LOG_EVERY_S seconds."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, done: int, total: int, correct: int) -> None:
        now = time.monotonic()
        if done == total or now - self._last >= LOG_EVERY_S:
            self._last = now
            logger.info("%d of %d completions, %d correct", done, total, correct)


def adapters_by_step(run: Path) -> dict[int, Path]:
    """Folders of the run's checkpoints by step, in order. Raises CheckpointError if there are none."""
    if not os.path.isdir(run):
        raise CheckpointError(f"--run {run}: {no_folder(str(run))}: give one that `qerl train` made (runs/NAME)")
    if kind_of(run) != "run":
        raise CheckpointError(f"--run {run} is no run directory: give one that `qerl train` made (runs/NAME)")
    if kind_of_run(run).packs:
        raise CheckpointError(
            f"--run {run} trains through the quantizer, so that its checkpoints are no adapters beside a base: write "
            f"`{export_line(run)} --step STEP`, and give the folder that it makes as --model; the finished run itself "
            "is taken as --model too"
        )
    all_steps = checkpoints_of(run).items()
    found = {step: folder for step, folder in all_steps if (folder / "adapter_config.json").is_file()}
    if not found:
        raise CheckpointError(f"{run} has no checkpoint yet: let it reach run.save_every steps, or give another run")
    return found


def choose(found: dict[int, Path], asked: str) -> dict[int, Path]:
    """The checkpoints asked for: `all`, `last`, or steps `40,80`. Raises ConfigError, which names those that exist."""
    if asked == "all":
        return found
    if asked == "last":
        return dict([max(found.items())])
    parts = [part.strip() for part in asked.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or int(part) not in found]
    if wrong:
        raise ConfigError(
            f"--checkpoints {asked!r}: there is no checkpoint {wrong[0]!r}; write all, last, or steps of "
            f"{', '.join(map(str, found))}"
        )
    return {step: found[step] for step in sorted(map(int, parts))}


def run_checkpoints(
    settings: EvalSettings, on_batch: OnBatch | None = None, parallel: Parallel = ALONE
) -> list[EvalResult]:
    """Evaluate checkpoints of a run (--run, --checkpoints) in the order of their steps; finished ones are only read.

    With --out, each has its own folder in it. Raises QerlError as `run_eval` does.
    """
    chosen = choose(adapters_by_step(settings.run), settings.checkpoints or "all")
    whole = replace(settings, run=None, checkpoints=None, model=str(settings.run))
    results = []
    with contextlib.closing(EngineHolder()) as holder:
        for step, folder in chosen.items():
            logger.info("checkpoint of step %d", step)
            out = None if settings.out is None else settings.out / folder.name
            one = replace(whole, adapter=str(folder), out=out, step=step)
            results.append(run_eval(one, on_batch, holder, parallel))
    return results
