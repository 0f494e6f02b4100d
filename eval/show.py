"""What an evaluation shows while it runs and when it is done. Importing this loads no torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.commands.option_names import ENGINE_OPTIONS
from qerl.errors import ConfigError

if TYPE_CHECKING:
    from eval.run import OnBatch
    from eval.settings import EvalSettings

OPTIONS = {  # recipe key in an error of the engine -> what sets it here
    **ENGINE_OPTIONS,
    "data.max_prompt_tokens": "the length of the prompts",
    "data.system_prompt": "--system-prompt",
    "data.prompt_template": "--prompt-template",
}

logger = logging.getLogger(__name__)


def show(settings: EvalSettings, run: Path | None = None, checkpoints: str = "all") -> None:
    """Evaluate with a progress bar on a terminal, and print the table and where the files are.

    With `run`, its `checkpoints` are evaluated, one column each.
    """
    from rich.console import Console

    from eval.checkpoints import run_checkpoints
    from eval.result import render_table
    from eval.run import run_eval

    try:
        with _progress() as on_batch:
            if run is None:
                results = [run_eval(settings, on_batch)]
            else:
                results = run_checkpoints(settings, run, checkpoints, on_batch and (lambda _: on_batch))
    except KeyboardInterrupt:
        logger.warning("stopped: the same command continues from the last whole batch")
        raise SystemExit(130) from None
    console = Console()
    console.print(
        render_table(results, None if run is None else [f"step {result.details['step']}" for result in results])
    )
    for result in results:
        console.print(f"completions and result: {result.out}", soft_wrap=True)


def show_suite(settings: EvalSettings, tasks_file: Path | None, run: Path | None) -> None:
    """Run lighteval's task and print its table. Raises ConfigError for options that lighteval decides itself."""
    from rich.console import Console

    from eval.lighteval_suite import run_suite, suite_table

    given = {"--run": run, "--data": settings.data, "--columns": settings.columns, "--pass-k": settings.pass_k or None}
    given |= {"--samples": settings.samples if settings.samples > 1 else None}
    given |= {"--prompt-template": settings.prompt_template}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{wrong[0]} does not go with --suite lighteval, whose task decides it: leave it out")
    result, out = run_suite(settings, tasks_file)
    console = Console()
    console.print(suite_table(result))
    console.print(f"result: {out}", soft_wrap=True)


@contextlib.contextmanager
def _progress() -> Iterator[OnBatch | None]:
    """A bar on a terminal; None (log lines) elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[share]}"), TimeRemainingColumn())
    progress = Progress(*columns, console=console)
    bar = progress.add_task("", total=None, share="")

    def on_batch(done: int, total: int, correct: int) -> None:
        progress.start()  # at the first call only: before it, log lines tell what is being loaded
        progress.update(bar, completed=done, total=total, share=f"correct {correct / done:.1%}" if done else "")

    try:
        yield on_batch
    finally:
        progress.stop()
