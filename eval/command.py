"""The command line of evaluation, once: `qerl eval TASK ...` and `python -m eval.<task> ...` share these options.

qerl/cli/main.py registers `evaluate` as `eval`; `main(task)` is the same with the task fixed. Nothing here imports
torch before the options are known to be good.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval.settings import EvalSettings
from eval.show import OPTIONS, measured, show_results, show_suite
from qerl.base.errors import ConfigError
from qerl.base.parallel import Parallel
from qerl.checkpoint.resolve import newest_model
from qerl.cli.launch import check_gpus, launch, one_card_each
from qerl.cli.options import Gpu, command_of, options_named
from qerl.cli.terminal import run_command
from qerl.plan.threads import choose_threads

if TYPE_CHECKING:
    from eval.result import EvalResult

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


def measure(settings: EvalSettings, parallel: Parallel) -> list[EvalResult]:
    """The result; with settings.run one of each of its checkpoints."""
    _choose_threads(settings)
    with options_named(OPTIONS):
        return measured(settings, parallel)


def _choose_threads(settings: EvalSettings) -> None:
    model = settings.run or settings.model
    if model is None and (newest := newest_model(settings.load)) is not None:
        model = newest.path
    if model is not None:
        choose_threads(str(model))


def compare_results(
    first: Annotated[Path, typer.Argument(help="Evaluation folder (`qerl eval` prints it).")],
    second: Annotated[Path, typer.Argument(help="Evaluation folder of the same questions and settings.")],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison as JSON into this file.")] = None,
) -> None:
    """Say whether the second evaluation is better or worse than the first, or that it cannot be told."""
    from eval.compare import compare
    from eval.result import write_json
    from qerl.base.printable import SafeConsole

    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder: give the file to write, such as {out / 'comparison.json'}")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}: make it first, or write another file")
    comparison = compare(first, second)
    if out is not None:
        write_json(out, comparison.to_json())
    SafeConsole().print(comparison.table(), soft_wrap=True)


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
