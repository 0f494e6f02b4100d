"""The command line: the commands in COMMANDS, at the end of this file, and those of `qerl recipes` before them.

Importing this loads no torch; each command imports what it runs.
"""

from __future__ import annotations

import json
import platform
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qerl import __version__
from qerl.base.devices import choose_card
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.printable import SafeConsole
from qerl.checkpoint.folder import RUNS, run_folder
from qerl.cli.chat import chat_command
from qerl.cli.doctor import refuse_clashes
from qerl.cli.init import init_command
from qerl.cli.options import Gpu, command_of
from qerl.cli.plan import plan_command
from qerl.cli.terminal import run_command
from qerl.cli.train import distill, recipe_values, sft, train, with_resume_value
from qerl.data.option_text import task_values
from qerl.data.tasks import TASKS
from qerl.plan.sizes import read_sizes

try:
    from qerl.cli.evaluate import compare_results, evaluate
    from qerl.cli.quantize import export_command, merge_command, quantize_command
except ImportError:  # names that other projects use too
    refuse_clashes()
    raise

if TYPE_CHECKING:
    from qerl.report.sections import Judged

STACK = ("torch", "transformers", "trl", "peft", "vllm", "compressed-tensors", "llmcompressor")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def print_version(asked: bool) -> None:
    """Print the versions of qerl, Python and the libraries that decide a run's numbers, and exit."""
    if asked:
        found = {"qerl": __version__, "python": platform.python_version(), **dict.fromkeys(STACK, "not installed")}
        for name in STACK:
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
        typer.echo("\n".join(f"{name} {version}" for name, version in found.items()))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Versions of qerl and its libraries.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """Reinforcement learning of language models on one GPU: NVFP4 base, BF16 LoRA, quantization noise."""


def main() -> None:
    """Entry point of the `qerl` script."""
    run_command(app, with_resume_value(sys.argv[1:]))


def grade(
    file: Annotated[Path, typer.Argument(help="jsonl with `answer` and `completion`, such as an evaluation's.")],
    task: Annotated[str, typer.Option(help="The task whose grading applies.", autocompletion=task_values)],
    grader: Annotated[str | None, typer.Option(help="Your own grading instead: file.py, file.py:function.")] = None,
) -> None:
    """Grade saved completions again, and say where a stored grade differs."""
    from qerl.data.grading.grade_file import grade_file, graded_by

    SafeConsole().print(grade_file(graded_by(task, grader), file).table())


def report(
    runs: Annotated[list[str], typer.Argument(help="A run directory, or its name in runs/; several are compared.")],
    before: Annotated[Path | None, typer.Option(help="Evaluation of the base, to compare with.")] = None,
    after: Annotated[Path | None, typer.Option(help="Evaluation of the trained adapter, or its run.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page to write; default: report.html in the run.")] = None,
) -> None:
    """Show what a run did: a page (report.html), curves as PNG, evaluation before and after, completions."""
    from qerl.cli.evaluate import evaluation_of
    from qerl.report.page import write_report

    before, after = (folder and evaluation_of(str(folder)) for folder in (before, after))
    write_report(list(map(run_folder, runs)), before, after, out, _judged(before, after) if before and after else None)


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, or a run.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List runs, the newest first: model, kind, steps, the last reward or loss, and how each of them ended."""
    from qerl.report.read import list_runs

    found = list_runs(run_folder(str(folder)))
    if as_json:
        typer.echo(json.dumps(list(map(asdict, found)), indent=1, default=str))
    else:
        found.show(SafeConsole())


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Check this machine: GPU, kernels, versions against the tested set, engine, disk, hub."""
    import qerl.cli.doctor

    found = qerl.cli.doctor.checks()
    if as_json:
        typer.echo(qerl.cli.doctor.as_json(found))
    else:
        SafeConsole().print(qerl.cli.doctor.table(found))
    if any(check.level == "error" for check in found):
        sys.exit(1)


def tune(
    model: Annotated[
        str, typer.Option(help="Model whose linears are measured: folder, run, or hub id of a known size.")
    ] = "Qwen/Qwen2.5-7B",
    gpu: Gpu = None,
) -> None:
    """Find how our kernels (products in NVFP4) run fastest on this card. Engines take it from then on."""
    linears = read_sizes(model).fused_linears()
    choose_card(gpu=gpu)
    import torch

    from qerl.formats.nvfp4.tuning import tune

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    tuned, path = tune(linears, device)
    said = (
        "Other sizes keep the defaults. Engines on this card take these tilings from now on, except with "
        f"rollout.deterministic. They are in {path}: please send it to us in an issue. Without that file the "
        "defaults are back."
    )
    SafeConsole().print(*tuned.lines(), said, sep="\n", highlight=False, soft_wrap=True)


def _judged(before: Path, after: Path) -> Judged | None:
    """What a difference between two evaluations means, or why that cannot be said; None if a folder holds none."""
    from eval.compare import compare
    from qerl.report.sections import Judged

    try:
        found = compare(before, after)
        return Judged(found.verdict, f"After training: {found.sentence()}.")
    except ConfigError as error:
        return Judged(None, f"No test of the difference: {error}.")
    except CheckpointError:
        return None


recipes_app = typer.Typer(invoke_without_command=True, help="The shipped recipes and what can stand in one.")
RecipeName = Annotated[str, typer.Argument(help="A shipped recipe's name.", autocompletion=recipe_values)]


@recipes_app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes, with what each is for."""
    if context.invoked_subcommand is not None:
        return
    from qerl.config.recipe import recipe_names, recipe_path

    for name in recipe_names():
        first = recipe_path(name).read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:22} {first.removeprefix('#').strip()}")


@recipes_app.command()
def show(name: RecipeName) -> None:
    """Print a recipe's file."""
    from qerl.config.recipe import recipe_path

    typer.echo(recipe_path(name).read_text(encoding="utf-8"), nl=False)


@recipes_app.command()
def copy(
    name: RecipeName, out: Annotated[Path | None, typer.Option(help="File to write; default: ./NAME.yaml.")] = None
) -> None:
    """Copy a recipe's file here, to change it."""
    from qerl.config.recipe import copy_recipe

    path = copy_recipe(name, out)
    typer.echo(f"{path}: change it, then run `qerl train --recipe {path}`")


@recipes_app.command()
def keys() -> None:
    """Every key of a recipe: type, default, meaning."""
    from qerl.config.keys import describe_config

    for key in describe_config():
        typer.echo(f"{key.key} ({key.type}; default {key.default}): {key.description}")


@recipes_app.command()
def tasks() -> None:
    """Every task, and the data set that it reads."""
    for name, task in TASKS.items():
        typer.echo(f"{name:12} {task.hub or ('generated' if task.generate else 'your rows: --data FILE')}")


COMMANDS = {  # name -> command and its line in `qerl --help`, in the order in which they are needed
    "doctor": (doctor, "Check this machine, and say how to fix what is wrong."),
    "init": (command_of(init_command), "Write a recipe, a grader and a reward for your own rows."),
    "plan": (plan_command, "Plan memory and seconds of a run before anything is loaded."),
    "quantize": (command_of(quantize_command), "Turn a 16-bit checkpoint into NVFP4, and verify it."),
    "train": (command_of(train), "Train a LoRA adapter by RL from a recipe, or resume a run."),
    "sft": (command_of(sft), "Train a model on conversations: supervised fine-tuning."),
    "distill": (command_of(distill), "Train a model to follow a 16-bit teacher, on its own completions."),
    "eval": (command_of(evaluate), "Measure a model's accuracy on a task, and save completions."),
    "compare": (compare_results, "Compare two evaluations: better, worse, or cannot tell."),
    "runs": (runs, "List runs: steps, last reward, running, finished or stopped."),
    "report": (report, "Write a page about a run, or about several side by side."),
    "grade": (grade, "Grade saved completions again."),
    "export": (command_of(export_command), "Turn a run or an adapter into a folder to serve or publish."),
    "merge": (command_of(merge_command), "The same as `qerl export`, into merged/."),
    "chat": (command_of(chat_command), "Talk to a base, a run, an adapter or a merged model."),
    "tune": (tune, "Find how our kernels run fastest on this card, for later runs."),
}
for _name, (_command, _line) in COMMANDS.items():
    app.command(_name, short_help=_line)(_command)
app.add_typer(recipes_app, name="recipes")


if __name__ == "__main__":
    main()
