"""The command line: COMMANDS, at the end, and `qerl recipes`.

Importing this loads no torch; each command imports what it runs.
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qerl.commands.chat import chat_command
from qerl.commands.columns import parse_columns
from qerl.commands.from_dataclass import command_of
from qerl.commands.plan import plan_command
from qerl.commands.recipes import app as recipes_app
from qerl.commands.shell_values import key_values, recipe_values, task_values
from qerl.commands.terminal import interrupts_counted, run_command
from qerl.doctor.doctor import refuse_clashes
from qerl.errors import ConfigError

try:
    from eval.command import compare_results, evaluate
    from quantize.merge.command import merge_command
except ImportError:  # names that other projects use too
    refuse_clashes()
    raise

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from training.run import TrainResult

logger = logging.getLogger(__name__)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement learning of language models on one GPU: NVFP4 base, BF16 LoRA, quantization noise.",
)
Method = StrEnum("Method", [(name, name) for name in ("rtn", "awq", "gptq")])
ModelOption = Annotated[str, typer.Option(help="Folder, hub id, or `tiny` (the model that ships with qerl).")]


def main() -> None:
    """Entry point of the `qerl` script."""
    run_command(app, with_resume_value(sys.argv[1:]))


def with_resume_value(arguments: list[str]) -> list[str]:
    """The arguments, with `--resume=last` for a `--resume` that has no value: typer options always take one."""
    following = [*arguments[1:], "--"]
    return (
        [
            f"{word}=last" if word == "--resume" and after.startswith("--") else word
            for word, after in zip(arguments, following, strict=True)
        ]
        if arguments
        else []
    )


def quantize(
    model: ModelOption,
    out: Annotated[Path | None, typer.Option(help="Default: checkpoints/<name>-NVFP4A16.")] = None,
    method: Annotated[Method, typer.Option(help="rtn needs no data; awq is the paper's.")] = Method.rtn,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Linears to leave in 16 bits, as llm-compressor writes them: 're:.*self_attn.*'. Repeatable."
        ),
    ] = None,
    calibration: Annotated[str | None, typer.Option(help="Rows for awq and gptq: jsonl file or hub name.")] = None,
    calibration_size: Annotated[int, typer.Option(help="Calibration rows (the paper: 256).")] = 256,
    sequence_length: Annotated[int, typer.Option(help="Tokens of each (the paper: 2048).")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Calibration rows a forward pass.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output folder.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the checkpoint.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Turn a 16-bit checkpoint into NVFP4 (4-bit weights, 16-bit activations), and verify it."""
    from rich.console import Console

    from qerl.devices import choose_card
    from quantize.run import quantize_checkpoint

    if device in ("auto", "cuda"):
        choose_card()
    report = quantize_checkpoint(
        model,
        out,
        str(method),
        ignore or (),
        calibration,
        calibration_size,
        sequence_length,
        batch_size,
        overwrite,
        trust_remote_code,
        device,
    )
    Console().print(report.table())


def train(
    recipe: Annotated[
        str | None, typer.Option(help="Name (`qerl recipes`) or YAML file.", autocompletion=recipe_values)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Base, NVFP4 folder, run or adapter; default: the recipe's.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Task: prompt and grading; default: the recipe's.", autocompletion=task_values)
    ] = None,
    data: Annotated[str | None, typer.Option(help="jsonl, parquet or csv file, folder, or hub name.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of --data: question=problem,answer=solution")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key=value over the recipe: --set run.steps=100. Repeatable.", autocompletion=key_values
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer steps; default: the recipe's. With --resume: the run's new number in all."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default: runs/<recipe>-<time>.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[RUN|STEP]",
            help="Continue a run: this one; this step of the last one; without a value the last one "
            "(of --recipe, or that at --out). Of the other options only --steps goes with it.",
        ),
    ] = None,
    quantize_first: Annotated[
        bool, typer.Option("--quantize", help="Quantize the base first if that has not been done.")
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Only the plan, the data and the rewards on five rows.")
    ] = False,
) -> None:
    """Train a LoRA adapter by reinforcement learning, as a recipe says."""
    if resume is not None:
        _refuse_with_resume(model, task, data, columns, overrides, seed, quantize_first or None, dry or None)
        from training.preflight.early import check_resumed
        from training.run_dir.resume import find_run

        run_dir, step = find_run(resume, recipe, out)
        check_resumed(run_dir, step, steps)
        _take_one_card()
        with interrupts_counted():
            logger.info("loading torch, transformers and trl")
            from training.run import resume as resume_run

        _exit_if_stopped(resume_run(run_dir, step, steps))
        return
    if recipe is None:
        raise ConfigError("no recipe was given: write `qerl train --recipe NAME`; `qerl recipes` lists the names")
    from qerl.config.recipe import load_recipe, recipe_label

    overrides = [*(overrides or []), *_column_overrides(columns)]
    flags = {"base": model, "task": task, "data": data, "steps": steps, "seed": seed, "out": out and str(out)}
    config = load_recipe(recipe, overrides, **flags)
    from training.preflight.early import check_config
    from training.run_dir.folder import new_run_dir

    new_run_dir(config.run.out, recipe_label(recipe))
    check_config(config)
    _take_one_card()
    _check_base(config, recipe, quantize_first)
    if dry:
        from rich.console import Console

        with interrupts_counted():
            logger.info("loading torch and transformers")
            from training.preflight.dry_run import dry_run

        sys.exit(0 if dry_run(config, Console()) else 1)
    with interrupts_counted():
        logger.info("loading torch, transformers and trl")
        from training.run import start

    _exit_if_stopped(start(config, recipe_label(recipe)))


def grade(
    file: Annotated[Path, typer.Argument(help="jsonl with `answer` and `completion`, such as an evaluation's.")],
    task: Annotated[str, typer.Option(help="The task whose grading applies.", autocompletion=task_values)],
) -> None:
    """Grade saved completions again, and say where a stored grade differs."""
    from rich.console import Console

    from qerl.tasks.grade_file import grade_file

    Console().print(grade_file(task, file).table())


def report(
    runs: Annotated[list[Path], typer.Argument(help="A run directory; several are compared.")],
    before: Annotated[Path | None, typer.Option(help="Evaluation folder of the base, to compare with.")] = None,
    after: Annotated[Path | None, typer.Option(help="Evaluation folder of the trained adapter.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page to write; default: report.html in the run.")] = None,
) -> None:
    """Show what a run did: a page (report.html), curves as PNG, evaluation before and after, completions."""
    from qerl.report.write import write_report

    write_report(runs, before, after, out, _verdict(before, after) if before and after else None)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Check this machine: GPU, kernels, versions against the tested set, engine, disk, hub."""
    from rich.console import Console

    import qerl.doctor.doctor

    found = qerl.doctor.doctor.checks()
    if as_json:
        typer.echo(qerl.doctor.doctor.as_json(found))
    else:
        Console().print(qerl.doctor.doctor.table(found))
    if any(check.level == "error" for check in found):
        sys.exit(1)


def _verdict(before: Path, after: Path) -> str | None:
    """What the difference is worth, or why that cannot be said; None where a folder is no evaluation of ours."""
    from eval.compare import compare
    from qerl.errors import CheckpointError

    try:
        return compare(before, after).sentence()
    except ConfigError as error:
        return f"No test of the difference: {error}."
    except CheckpointError:
        return None


def _take_one_card() -> None:
    """Before torch and the libraries on it are imported, which would find other cards and other processes."""
    from qerl.devices import choose_card
    from qerl.parallel import open_parallel

    with open_parallel() as parallel:
        if parallel.size > 1:
            raise ConfigError(
                f"qerl trains on one GPU and was started as {parallel.size} processes: leave torchrun out"
            )
    choose_card()


def _exit_if_stopped(result: TrainResult) -> None:
    """An interrupted run has saved and said how to continue; whoever called it learns of it by the exit code."""
    if result.adapter is None:
        sys.exit(130)


def _refuse_with_resume(*options: object) -> None:
    if any(option is not None for option in options):
        raise ConfigError(
            "--resume continues a run as it was configured; of the options that change it --steps alone goes with it: "
            "leave the others out"
        )


def _column_overrides(columns: str | None) -> list[str]:
    if columns is None:
        return []
    return [f"data.columns={{{', '.join(f'{name}: {column!r}' for name, column in parse_columns(columns).items())}}}"]


def _check_base(config: RunConfig, recipe: str, quantize_first: bool) -> None:
    """The NVFP4 base must be there before anything heavy is loaded; with --quantize it is made."""
    from qerl.checkpoint.resolve import default_quantized_dir, resolve_model
    from qerl.errors import CheckpointError

    base = config.model.base
    try:
        resolve_model(base, config.model.format)
    except CheckpointError as error:
        missing = config.model.format == "nvfp4" and not default_quantized_dir(base).exists()
        if not missing or resolve_model(base).kind != "base16":
            raise
        if not quantize_first:
            raise CheckpointError(
                f"recipe {recipe} trains on {default_quantized_dir(base)}, which does not exist: run `qerl quantize "
                f"--model {base}` first, or add --quantize"
            ) from error
        from quantize.run import quantize_checkpoint

        quantize_checkpoint(base, trust_remote_code=config.model.trust_remote_code)


COMMANDS = {  # name -> command and its line of `qerl --help`, in the order in which one needs them
    "doctor": (doctor, "Check this machine; the remedy beside what is wrong."),
    "plan": (plan_command, "Memory and seconds of a run, before anything is loaded."),
    "quantize": (quantize, "Turn a 16-bit checkpoint into NVFP4, and verify it."),
    "train": (train, "Train a LoRA adapter by RL, as a recipe says; or resume."),
    "eval": (command_of(evaluate), "Accuracy of a model on a task, every completion saved."),
    "compare": (compare_results, "Of two evaluations: better, worse, or cannot tell."),
    "report": (report, "A page of what a run did; several runs side by side."),
    "grade": (grade, "Grade saved completions again."),
    "merge": (merge_command, "Make of an adapter a folder to serve or publish."),
    "chat": (chat_command, "Talk to a base, a run, an adapter or a merged model."),
}
for _name, (_command, _line) in COMMANDS.items():
    app.command(_name, short_help=_line)(_command)
app.add_typer(recipes_app, name="recipes")


if __name__ == "__main__":
    main()
