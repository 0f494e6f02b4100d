"""Evaluate a model on a task: `run_eval(EvalSettings(task="gsm8k", model="runs/a")).summary.accuracy.value`.

    plan (eval/plan.py) -> engine + adapter -> completions -> grades -> folder and summary (eval/result.py)

The engine is the one that training samples with, the prompt is the one that was trained on, and the grade is the one
that rewards give. `run_checkpoints` evaluates several checkpoints of one run: the base is loaded once, and the adapters
are exchanged (`qerl eval gsm8k --run runs/a --checkpoints all`, or `last`, or steps: `40,80`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.environment import as_completion, episode_fields, sampled_episodes, versions
from eval.plan import Plan, batch_seed, make_plan
from eval.result import EvalResult, Key, Row, Store, open_store, summarize
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError, RewardError
from qerl.base.files import no_folder
from qerl.base.isolate import ReturnedError
from qerl.base.own_function import LateError, OwnFunctionError, first_to_fail
from qerl.base.parallel import ALONE, Parallel, check_same
from qerl.checkpoint.adapter_file import export_line, kind_of_run
from qerl.checkpoint.folder import kind_of
from qerl.checkpoint.load import text_of_engine
from qerl.checkpoint.resolve import ModelRef, describe
from qerl.data.grading.grade import Grade, grade_many
from qerl.data.tasks import Task
from qerl.engine.interface import Completion, Engine
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.engine.update import AdapterUpdate, deliver
from qerl.episodes.driven import Episode

if TYPE_CHECKING:
    import torch


def graded(plan: Plan, batch: Sequence[Key], completions: Sequence[Completion], texts: list[str]) -> list[Grade]:
    """The grades of a batch. Raises RewardError, which names the completion on which a grader fails."""
    examples = [plan.examples[row] for row, _ in batch]
    questions, answers = [one.question for one in examples], [one.answer for one in examples]
    if plan.task.grader is None:
        return grade_many(plan.task, texts, answers, questions)
    names = dict.fromkeys(key for example in examples for key in example.extra)
    columns = {
        **{name: [example.extra.get(name) for example in examples] for name in names},
        "completions": texts,
        "completion_ids": [list(completion.token_ids) for completion in completions],
        "prompts": [plan.tokenizer.decode(plan.prompts[row], skip_special_tokens=False) for row, _ in batch],
        "question": questions,
        "answer": answers,
        "row": [row for row, _ in batch],
    }
    limit = plan.sampling.max_new_tokens
    fixed = {"max_new_tokens": limit, "step": plan.settings.step or 0, "log_metric": _log_nothing}
    try:
        return _call(plan.task, columns, fixed)
    except (OwnFunctionError, ReturnedError) as error:
        index = error.index if error.index is not None else _first_to_fail(plan.task, columns, fixed, error)
        where = "" if index is None else f" for the completion {texts[index][:60]!r} of row {examples[index].id}"
        late = " within --grader-timeout-s" if isinstance(error, LateError) else ""
        raise RewardError(
            f"grader {plan.task.grader} {error}{where}: a grader has to return a number from 0 to 1, or True or False, "
            f"for each completion{late}; correct it, then the same command continues"
        ) from error


def _call(task: Task, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any]) -> list[Grade]:
    others = {name: values for name, values in columns.items() if name not in ("completions", "answer", "question")}
    return grade_many(task, columns["completions"], columns["answer"], columns["question"], {**others, **fixed})


def _first_to_fail(
    task: Task, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any], error: Exception
) -> int | None:
    if isinstance(error, ReturnedError):
        return None

    def call(index: int, timeout_s: float) -> None:
        one = {name: [values[index]] for name, values in columns.items()}
        _call(replace(task, grader_timeout_s=timeout_s), one, fixed)

    return first_to_fail(call, len(columns["completions"]), task.grader_timeout_s)


def _log_nothing(_name: str, _value: float) -> None:
    """The `log_metric` that a grader gets in an evaluation."""


logger = logging.getLogger(__name__)

LOG_EVERY_S = 20.0
STEP = re.compile(r"step-(\d+)")  # how training names its checkpoints
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
        adapter = None if plan.ref.adapter is None else _read_adapter(plan.ref)
        options = engine_options(plan, None if adapter is None else adapter.tensors)
        key = (plan.ref.base, plan.ref.format, options, adapter is None)
        if self.engine is None or key != self._key:
            self.close()
            self.engine, self._key = open_engine(plan.ref.base, plan.ref.format, options), key
            logger.info("engine %s, %s", self.engine.name, self.engine.kernel)
        if adapter is not None:
            count = deliver(AdapterUpdate(adapter.tensors, adapter.scaling), self.engine)
            logger.info("adapter %s: %d tensors are in the engine", plan.ref.adapter, count)
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None


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
    if plan.environments is not None and parallel.size > 1:
        raise ConfigError("environments are played by one process: leave out --gpus")
    check_same(parallel, plan.identity)
    on_batch = on_batch or _Log()
    with _store(plan, parallel) as store:
        rows = parallel.broadcast(store.resume(plan.batches) if store else [])
        missing = sum(map(len, plan.batches)) - len(rows)
        if rows:
            logger.info("%s holds %d completions; %d are missing", plan.out, len(rows), missing)
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
    context = max(map(len, plan.prompts)) + plan.sampling.max_new_tokens
    options = replace(plan.settings.engine_options(), max_context=context, start=plan.ref.start)
    return options if adapter is None else options.for_adapter(adapter)


@dataclass(frozen=True)
class _Adapter:
    tensors: Mapping[str, torch.Tensor]
    scaling: float


def _read_adapter(ref: ModelRef) -> _Adapter:
    from qerl.checkpoint.adapter import read_fitting_adapter

    tensors, scaling = read_fitting_adapter(ref.adapter, ref.base)
    return _Adapter(tensors, scaling)


def complete(
    plan: Plan, engine: Engine, store: Store | None, rows: list[Row], on_batch: OnBatch, parallel: Parallel = ALONE
) -> None:
    """Sample and grade the batches that `rows` lacks, and append them to `rows` and to the store, if it is here.

    Each process takes its share of every batch, so that what is saved does not depend on how many there are.
    """
    total, text = sum(map(len, plan.batches)), text_of_engine(plan.tokenizer, engine)

    def texts_of(completions: Sequence[Completion]) -> list[str]:
        return text.batch([completion.token_ids for completion in completions])

    on_batch(len(rows), total, _correct(rows))
    done = 0
    for number, batch in enumerate(plan.batches):
        done += len(batch)
        if done <= len(rows):
            continue
        start = time.perf_counter()
        share = parallel.span(len(batch))
        prompts = [plan.prompts[row] for row, _ in batch[share]]
        seed = batch_seed(plan.settings.seed, number)
        if plan.environments is not None:
            episodes = sampled_episodes(plan, engine, batch, seed)
            completions = list(map(as_completion, episodes))
            graded = grade_batch(plan, number, batch, completions, texts_of(completions), episodes)
        else:
            completions = engine.generate(prompts, plan.sampling, seed, first_index=share.start) if prompts else []
            graded = grade_batch(plan, number, batch[share], completions, texts_of(completions)) if prompts else []
        graded = [row for part in parallel.gather(graded) for row in part]
        seconds = round(time.perf_counter() - start, 3)
        graded = [{**row, "batch_seconds": seconds} for row in graded]
        if store:
            store.append(graded)
        rows += graded
        on_batch(len(rows), total, _correct(rows))


def grade_batch(
    plan: Plan,
    number: int,
    batch: Sequence[Key],
    completions: Sequence[Completion],
    texts: list[str],
    episodes: Sequence[Episode] | None = None,
) -> list[Row]:
    """One row for each completion of a batch, with its text. Of an episode the model's last turn is graded."""
    if episodes is not None:
        texts = [episode.answer for episode in episodes]
    grades = graded(plan, batch, completions, texts)
    rows = []
    for index, ((row, sample), completion, text, judged) in enumerate(
        zip(batch, completions, texts, grades, strict=True)
    ):
        example = plan.examples[row]
        rows.append(
            {
                "row": row,
                "id": example.id,
                "sample": sample,
                "question": example.question,
                "answer": example.answer,
                "completion": text,
                "prompt_tokens": len(plan.prompts[row]),
                "tokens": len(completion.token_ids),
                "truncated": completion.finish_reason == "length",
                "extracted": judged.extracted,
                "correct": judged.correct,
                "reason": judged.reason,
                **({} if judged.score is None else {"score": judged.score}),
                **(episode_fields(episodes[index]) if episodes is not None else {}),
                "batch": number,
            }
        )
    return rows


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


def checkpoints_of(run: Path) -> dict[int, Path]:
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
    named = ((STEP.fullmatch(file.parent.name), file.parent) for file in run.glob("checkpoints/*/adapter_config.json"))
    found = dict(sorted((int(match[1]), folder) for match, folder in named if match))
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
    chosen = choose(checkpoints_of(settings.run), settings.checkpoints or "all")
    whole = replace(settings, run=None, checkpoints=None, model=str(settings.run))
    results = []
    with contextlib.closing(EngineHolder()) as holder:
        for step, folder in chosen.items():
            logger.info("checkpoint of step %d", step)
            out = None if settings.out is None else settings.out / folder.name
            one = replace(whole, adapter=str(folder), out=out, step=step)
            results.append(run_eval(one, on_batch, holder, parallel))
    return results
