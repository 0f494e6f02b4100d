"""`qerl.evaluate`: accuracy of a model on a task or on rows of one's own, with its interval."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.api.arguments import Function, Functions, Rows, check_keywords, grader_of, is_path, model_name, plain_rows
from qerl.api.given import PYTHON, given

if TYPE_CHECKING:
    from eval.result import EvalResult
    from qerl.api.run import Run

ROWS = f"{PYTHON}:data"  # the name of rows that the program gave
NOT_HERE = ("suite", "suite_tasks", "run", "checkpoints")  # of the command alone


def evaluate(
    task: str,
    model: str | os.PathLike | Run | None = None,
    *,
    data: str | os.PathLike | Rows | None = None,
    grader: str | Function | None = None,
    gpu: int | None = None,
    **settings: Any,
) -> EvalResult:
    """Measure a model on a task: `evaluate("gsm8k", run).summary.accuracy` has value, low and high.

    `settings` are those of `qerl eval` (docs/commands.md), such as limit, samples, sampled, max_new_tokens and out. All
    completions are saved, and the same call reads a finished evaluation, or continues one that was interrupted.
    """
    from eval.settings import EvalSettings
    from qerl.api.process import as_before

    known = [each.name for each in fields(EvalSettings) if each.name not in ("task", *NOT_HERE)]
    check_keywords(settings, known, "qerl.evaluate")
    functions = Functions()
    rows = None if data is None or is_path(data) else plain_rows(data)
    chosen = EvalSettings(
        task=task,
        model=None if model is None else model_name(model),
        data=ROWS if rows is not None else data and os.fspath(data),
        grader=grader_of(grader, functions),
        **_typed(settings),
    )
    with given(functions, {} if rows is None else {ROWS: rows}), as_before():
        return _evaluated(chosen, gpu)


def _evaluated(settings: Any, gpu: int | None) -> EvalResult:
    from eval.command import measure
    from qerl.cli.launch import one_card_each

    with one_card_each(gpu) as parallel:
        return measure(settings, parallel)[0]


def _typed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Paths and sequences as the settings hold them."""
    typed = dict(settings)
    if typed.get("out") is not None:
        typed["out"] = Path(typed["out"])
    if typed.get("adapter") is not None:
        typed["adapter"] = model_name(typed["adapter"])
    if "pass_k" in typed:
        typed["pass_k"] = tuple(sorted(set(typed["pass_k"])))
    return typed
