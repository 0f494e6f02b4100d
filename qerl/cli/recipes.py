"""`qerl recipes`: the shipped recipes, all keys and all tasks. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qerl.cli.train import recipe_values

app = typer.Typer(invoke_without_command=True, help="The shipped recipes and what can stand in one.")
RecipeName = Annotated[str, typer.Argument(help="A shipped recipe's name.", autocompletion=recipe_values)]


@app.callback()
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes, with what each is for."""
    if context.invoked_subcommand is not None:
        return
    from qerl.config.recipe import recipe_names, recipe_path

    for name in recipe_names():
        first = recipe_path(name).read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:22} {first.removeprefix('#').strip()}")


@app.command()
def show(name: RecipeName) -> None:
    """Print a recipe's file."""
    from qerl.config.recipe import recipe_path

    typer.echo(recipe_path(name).read_text(encoding="utf-8"), nl=False)


@app.command()
def copy(
    name: RecipeName,
    out: Annotated[Path | None, typer.Option(help="File to write; default: ./NAME.yaml.")] = None,
) -> None:
    """Copy a recipe's file here, to change it."""
    from qerl.config.recipe import copy_recipe

    path = copy_recipe(name, out)
    typer.echo(f"{path}: change it, then run `qerl train --recipe {path}`")


@app.command()
def keys() -> None:
    """Every key of a recipe: type, default, meaning."""
    from qerl.config.keys import describe_config

    for key in describe_config():
        typer.echo(f"{key.key} ({key.type}; default {key.default}): {key.description}")


@app.command()
def tasks() -> None:
    """Every task, and the data set that it reads."""
    from qerl.data.tasks import TASKS

    for name, task in TASKS.items():
        typer.echo(f"{name:12} {task.hub or ('generated' if task.generate else 'your rows: --data FILE')}")
