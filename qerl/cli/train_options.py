"""What `qerl train`, `qerl sft` and `qerl distill` may be told. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from qerl.cli.columns import parse_columns, parse_names
from qerl.cli.from_dataclass import Text
from qerl.cli.option_names import Gpu
from qerl.cli.shell_values import key_values, recipe_values, task_values


@dataclass(frozen=True)
class TrainOptions:
    """What is asked of `qerl train`, whose options these are."""

    recipe: Annotated[
        str | None, typer.Option(help="Name (`qerl recipes`) or YAML file.", autocompletion=recipe_values)
    ] = None
    model: Annotated[str | None, typer.Option(help="Base, NVFP4 folder, run or adapter; default: the recipe's.")] = None
    task: Annotated[
        str | None, typer.Option(help="Task: prompt and grading; default: the recipe's.", autocompletion=task_values)
    ] = None
    data: Annotated[str | None, typer.Option(help="jsonl, json, csv or parquet file, folder, or hub name.")] = None
    columns: Annotated[
        Mapping[str, str] | None,
        Text(parse_columns),
        typer.Option(help="Columns of --data: question=problem,answer=solution"),
    ] = None
    system_prompt: Annotated[str | None, typer.Option(help='System message, "" for none; default: the recipe.')] = None
    prompt_template: Annotated[
        str | None, typer.Option(help="User message, with {question} in it; default: the recipe's.")
    ] = None
    grader: Annotated[
        str | None, typer.Option(help="Your own grading: file.py, file.py:function; default: the task's.")
    ] = None
    environment: Annotated[
        str | None,
        typer.Option(help="Episodes with it: calculator, word_game, file.py:Name, or a URL; default: the recipe's."),
    ] = None
    tools: Annotated[
        tuple[str, ...] | None,
        Text(parse_names),
        typer.Option(help="Tools of the model, by comma: file.py:function; default: the recipe's."),
    ] = None
    overrides: Annotated[
        tuple[str, ...],
        typer.Option(
            "--set", help="key=value over the recipe: --set run.steps=100. Repeatable.", autocompletion=key_values
        ),
    ] = ()
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer steps; default: the recipe's. With --resume: the run's new number in all."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Default: the recipe's.")] = None
    out: Annotated[Path | None, typer.Option(help="Run directory; default: runs/<recipe>-<time>.")] = None
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[RUN|STEP]",
            help="Continue a run: this one; this step of the last one; without a value the last one "
            "(of --recipe, or that at --out). Of the other options --steps goes with it, and --model for a base that "
            "has moved.",
        ),
    ] = None
    accept_changes: Annotated[
        bool, typer.Option(help="With --resume: continue although rows, rewards or packages changed.")
    ] = False
    quantize_first: Annotated[
        bool, typer.Option("--quantize", help="Quantize the base first if that has not been done.")
    ] = False
    gpu: Gpu = None
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Cards of this machine to train on; for several machines use torchrun.")
    ] = None
    dry: Annotated[bool, typer.Option("--dry-run", help="Only the plan, the data and the rewards on five rows.")] = (
        False
    )
    teacher: str | None = None  # of `qerl distill`
    section: str | None = None  # that a recipe gets if it has none: of `qerl distill` and `qerl sft`
    implied: tuple[str, ...] = ()  # settings of such a command, before those that are given
