"""`qerl eval`, `qerl compare` and `python -m eval.<task>`: their options, and what is shown during and after an
evaluation.

qerl/cli/main.py registers `evaluate` as `eval`; `main(task)` is the same with the task fixed. Nothing here imports
torch before the options are known to be good.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval.settings import EvalSettings, flag
from qerl.base.errors import MAX_PROMPT_TOKENS, PROMPT_TEMPLATE, SYSTEM_PROMPT, ConfigError
from qerl.base.parallel import ALONE, Parallel
from qerl.base.printable import SafeConsole
from qerl.checkpoint.folder import run_folder
from qerl.checkpoint.resolve import newest_model
from qerl.cli.launch import check_gpus, launch, one_card_each
from qerl.cli.next_step import after_evaluating, say_next
from qerl.cli.options import ENGINE_OPTIONS, Gpu, command_of, options_named
from qerl.cli.terminal import run_command
from qerl.plan.threads import choose_threads

if TYPE_CHECKING:
    from eval.result import EvalResult
    from eval.run import OnBatch


OPTIONS = {  # what errors name here in place of keys of a recipe
    **ENGINE_OPTIONS,
    MAX_PROMPT_TOKENS: "the length of the prompts",
    SYSTEM_PROMPT: "--system-prompt",
    PROMPT_TEMPLATE: "--prompt-template",
}


logger = logging.getLogger(__name__)


def measure(settings: EvalSettings, parallel: Parallel = ALONE) -> list[EvalResult]:
    """Evaluate with a progress bar on a terminal. With --run, there is a result for each of its checkpoints."""
    _choose_threads(settings)
    with options_named(OPTIONS):
        from eval.run import run_checkpoints, run_eval

        try:
            with _progress(parallel) as on_batch:
                if settings.run:
                    return run_checkpoints(settings, on_batch, parallel)
                return [run_eval(settings, on_batch, parallel=parallel)]
        except KeyboardInterrupt:
            logger.warning("stopped: the same command continues from the last whole batch")
            raise


def show_results(settings: EvalSettings, results: Sequence[EvalResult]) -> None:
    """Print the table, one column for each result, and where the files are."""
    from eval.result import render_table

    console = SafeConsole()
    labels = None if settings.run is None else [f"step {result.details['step']}" for result in results]
    console.print(render_table(results, labels))
    for result in results:
        console.print(f"completions and result: {result.out}", soft_wrap=True)
    best = max(results, key=lambda result: result.summary.accuracy.value).details
    say_next(after_evaluating(best["base"], best["adapter"], best["format"]))


def show_suite(settings: EvalSettings) -> None:
    """Run lighteval's task and print its table. Raises ConfigError for options that lighteval decides itself."""
    from eval.lighteval_suite import run_suite, suite_table

    for name in ("run", "data", "columns", "pass_k", "samples", "prompt_template"):
        if getattr(settings, name) != getattr(EvalSettings, name):
            raise ConfigError(f"{flag(name)} does not go with --suite lighteval, whose task decides it: leave it out")
    result, out = run_suite(settings)
    console = SafeConsole()
    console.print(suite_table(result))
    console.print(f"result: {out}", soft_wrap=True)


@contextlib.contextmanager
def _progress(parallel: Parallel) -> Iterator[OnBatch | None]:
    """A progress bar on a terminal. Elsewhere None, so that progress is logged."""
    console = SafeConsole(stderr=True)
    if not parallel.first or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[share]}"), TimeRemainingColumn())
    progress = Progress(*columns, console=console)
    bar = progress.add_task("", total=None, share="")

    def on_batch(done: int, total: int, correct: int) -> None:
        progress.start()  # only now: until the first call, log lines tell what is being loaded
        progress.update(bar, completed=done, total=total, share=f"correct {correct / done:.1%}" if done else "")

    try:
        yield on_batch
    finally:
        progress.stop()


Gpus = Annotated[int | None, typer.Option(min=1, help="Cards of this machine that share the questions; default: one.")]


def evaluate(settings: EvalSettings, gpu: Gpu = None, gpus: Gpus = None) -> None:
    """Measure a model on a task: accuracy with its 95% interval, every completion saved.

    A killed evaluation continues with the same command, to the same numbers.
    """
    check_gpus(gpu, gpus)
    if gpus is not None and gpus > 1:
        if settings.suite is not None:
            raise ConfigError("--gpus does not go with --suite lighteval, which runs in one process: leave it out")
        launch(gpus, sys.argv[1:])
    with one_card_each(gpu) as parallel:
        if settings.suite is None:
            try:
                results = measure(settings, parallel)
            except KeyboardInterrupt:
                raise SystemExit(130) from None
            if parallel.first:
                show_results(settings, results)
        else:
            _choose_threads(settings)
            with options_named(OPTIONS):
                show_suite(settings)


def _choose_threads(settings: EvalSettings) -> None:
    model = settings.run or settings.model
    if model is None and (newest := newest_model(settings.load)) is not None:
        model = newest.path
    if model is not None:
        choose_threads(str(model))


def compare_results(
    first: Annotated[str, typer.Argument(help="Evaluation folder (`qerl eval` prints it), or a run that has one.")],
    second: Annotated[str, typer.Argument(help="One of the same questions and settings, or its run.")],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison as JSON into this file.")] = None,
) -> None:
    """Say whether the second evaluation is better or worse than the first, or that it cannot be told."""
    from eval.compare import compare
    from eval.result import write_json

    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder: give the file to write, such as {out / 'comparison.json'}")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}: make it first, or write another file")
    comparison = compare(evaluation_of(first), evaluation_of(second))
    if out is not None:
        write_json(out, comparison.to_json())
    SafeConsole().print(comparison.table(), soft_wrap=True)


def evaluation_of(ref: str) -> Path:
    """The evaluation that `ref` names: a folder, or the only one in a run. Raises ConfigError if a run has others."""
    folder = run_folder(ref)
    found = sorted(result.parent for result in folder.glob("eval/*/result.json"))
    if len(found) > 1:
        raise ConfigError(f"{folder} has several evaluations: write {' or '.join(map(str, found))}")
    return found[0] if found else folder


def task_app(task: str) -> typer.Typer:
    """A typer app with the options of `evaluate`, for one task."""
    command = command_of(evaluate, task=task)
    command.__doc__ = evaluate.__doc__.replace("on a task", f"on {task}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    return app


def main(task: str, arguments: list[str] | None = None) -> None:
    """`python -m eval.<task>`. Default: sys.argv's arguments."""
    run_command(task_app(task), arguments, f"python -m eval.{task}")
