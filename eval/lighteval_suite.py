"""lighteval's own tasks on our engine: `qerl eval --suite lighteval 'gsm8k|0'`.

Prompts, metrics and aggregation are lighteval 0.13's; base, adapter and sampling are ours. With --suite-tasks
FILE (Python with lighteval's TASKS_TABLE) only the tasks of that file are known, and only what they name is downloaded.
lighteval's own registry loads a model from the hub when it is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from eval.plan import context_length, default_out, find_model, with_engine, with_memory
from eval.result import write_json
from eval.settings import MAX_NEW_TOKENS, EvalSettings
from qerl.base.errors import CheckpointError, ConfigError, DataError, MissingExtraError, first_line
from qerl.base.versions import versions
from qerl.checkpoint.folder import weights_digest
from qerl.checkpoint.load import load_tokenizer, local_folder
from qerl.checkpoint.resolve import ModelRef, describe, run_of
from qerl.engine.open import open_model

logger = logging.getLogger(__name__)

SUITE_RESULT = "lighteval.json"


def run_suite(settings: EvalSettings) -> tuple[dict[str, Any], Path]:
    """Run lighteval's task; returns what lighteval.json holds, and its folder. Raises a fitting QerlError."""
    if importlib.util.find_spec("lighteval") is None:
        raise MissingExtraError("lighteval", "eval")
    if settings.suite_tasks is not None and not settings.suite_tasks.is_file():
        raise ConfigError(f"--suite-tasks {settings.suite_tasks} is no file: write a Python file with TASKS_TABLE")
    import torch

    ref = find_model(settings)
    settings = with_memory(with_engine(settings), run_of(ref))
    task = "".join(char if char.isalnum() else "-" for char in settings.task)
    asked = {"weights": weights_digest(ref.adapter or Path(ref.base)), "limit": settings.limit}
    out = settings.out or default_out(ref, f"lighteval-{task}", asked)
    if (out / SUITE_RESULT).exists() and not settings.overwrite:
        raise CheckpointError(f"{out} holds a result already: give another --out, or --overwrite")
    started = time.monotonic()
    # lighteval 0.13 switches gradients off for the whole process when it is imported (transformers_model.py, line 70).
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        scores = _scores(settings, ref)
    result = {
        "suite": "lighteval",
        "task": settings.task,
        "model": describe(ref),
        "base": ref.base,
        "adapter": None if ref.adapter is None else str(ref.adapter),
        "format": ref.format,
        "scores": scores,
        "limit": settings.limit,
        "seconds": round(time.monotonic() - started, 1),
        "versions": versions(),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SUITE_RESULT, result)
    return result, out


def suite_table(result: dict[str, Any]) -> Table:
    """One line per task and metric, with lighteval's standard error."""
    table = Table("task", "metric", "value", "standard error", title=Text(result["model"]), box=box.SIMPLE_HEAD)
    for task, metrics in result["scores"].items():
        for name, value in metrics.items():
            if not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr")
                table.add_row(Text(task), Text(name), f"{value:.4f}", "" if error is None else f"{error:.4f}")
    return table


def _scores(settings: EvalSettings, ref: ModelRef) -> dict[str, dict[str, float]]:
    _accept_parser()
    from httpx import TransportError
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters

    from eval.lighteval_model import EngineModel

    with tempfile.TemporaryDirectory() as scratch, _known_tasks(settings.suite_tasks):
        folder = local_folder(ref.base)
        tokenizer = load_tokenizer(folder, settings.trust_remote_code)
        context = context_length(folder) or MAX_NEW_TOKENS
        engine = open_model(ref, settings.engine_options())
        try:
            model = EngineModel(engine, tokenizer, settings, context, scratch)
            pipeline = Pipeline(
                tasks=settings.task,
                pipeline_parameters=PipelineParameters(
                    launcher_type=ParallelismManager.CUSTOM, max_samples=settings.limit
                ),
                evaluation_tracker=EvaluationTracker(output_dir=scratch),
                model=model,
            )
            pipeline.evaluate()
        except (ValueError, OSError, ImportError, TransportError) as error:
            raise DataError(
                f"lighteval cannot run {settings.task!r} ({first_line(error)}): write task|few_shot, or give a task on "
                "local files with --suite-tasks FILE; without it lighteval downloads what a task needs"
            ) from error
        finally:
            engine.close()
        results = pipeline.get_results()["results"]
    return {name: {key: float(v) for key, v in scores.items()} for name, scores in results.items() if name != "all"}


PARSER = "latex2sympy2_extended"


def _accept_parser() -> None:
    """Let lighteval's metrics for LaTeX use the parser that our grading needs.

    lighteval 0.13 pins latex2sympy2_extended 1.0.6 in its extra `math` and cannot be imported beside another version.
    math-verify 0.9.0 brings 1.11.0, with which these metrics give the same verdicts on the pairs in
    tests/eval/test_lighteval.py. Remove when lighteval's pin fits math-verify's.
    """
    from lighteval.utils.imports import is_package_available, required_dependencies
    from packaging.requirements import Requirement

    required, installed = required_dependencies()[0], version(PARSER)
    pinned = required.get(PARSER)
    if pinned is None or installed in pinned.specifier:
        return
    logger.warning(
        "lighteval's metrics for LaTeX use %s %s here instead of %s: compare their scores with those of other "
        "installations with care",
        *(PARSER, installed, pinned.specifier),
    )
    required[PARSER] = Requirement(f"{PARSER}=={installed}")
    is_package_available.cache_clear()
    if not is_package_available(PARSER):
        raise DataError(f"lighteval does not accept {PARSER} {installed}: install lighteval 0.13.0")


@contextlib.contextmanager
def _known_tasks(tasks_file: Path | None) -> Iterator[None]:
    """Let lighteval know only the tasks of `tasks_file`; None leaves it its own."""
    from lighteval.tasks.registry import Registry

    if tasks_file is None:
        yield
        return
    try:
        configs = Registry._extract_configs(Registry.create_custom_tasks_module(tasks_file))
    except Exception as error:  # the user's own code
        raise ConfigError(f"--suite-tasks {tasks_file} failed when it was loaded ({error!r}): correct it") from error
    if not configs:
        raise ConfigError(
            f"--suite-tasks {tasks_file} has no TASKS_TABLE with a task in it: write one, as lighteval's tasks do"
        )
    before = Registry.__dict__["load_all_task_configs"]
    Registry.load_all_task_configs = staticmethod(lambda custom_tasks=None, load_multilingual=False: configs)
    try:
        yield
    finally:
        Registry.load_all_task_configs = before
