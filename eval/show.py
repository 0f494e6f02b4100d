"""What an evaluation shows while it runs and at its end. Importing this loads no torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from eval.settings import EvalSettings, flag
from qerl.base.errors import MAX_PROMPT_TOKENS, PROMPT_TEMPLATE, SYSTEM_PROMPT, ConfigError
from qerl.base.parallel import ALONE, Parallel
from qerl.cli.next_step import after_evaluating, say_next
from qerl.cli.options import ENGINE_OPTIONS

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


def measured(settings: EvalSettings, parallel: Parallel = ALONE) -> list[EvalResult]:
    """Evaluate with a progress bar on a terminal. With --run, there is a result for each of its checkpoints."""
    from eval.checkpoints import run_checkpoints
    from eval.run import run_eval

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
    from qerl.base.printable import SafeConsole

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
    from qerl.base.printable import SafeConsole

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
    from qerl.base.printable import SafeConsole

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
