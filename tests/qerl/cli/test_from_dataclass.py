"""The fields of a dataclass as the options of a command."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from qerl.base.errors import ConfigError
from qerl.cli.options import command_of
from qerl.data.option_text import Text, parse_columns


@dataclass(frozen=True)
class Options:
    file: Annotated[Path, typer.Argument(help="A file.")]
    kind: Annotated[Literal["one", "two"], typer.Option(help="Which.")] = "one"
    columns: Annotated[Mapping[str, str] | None, Text(parse_columns), typer.Option(help="Pairs.")] = None
    numbers: Annotated[tuple[str, ...], Text(tuple), typer.Option(help="Letters.")] = ()
    names: Annotated[tuple[str, ...], typer.Option("--name", help="Repeatable.")] = ()
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False
    label: str = "not an option"


def run(options: Options) -> None:
    """Do it."""
    made.append(options)


made = []


def invoke(*arguments, **fixed):
    made.clear()
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(command_of(run, **fixed))
    return CliRunner().invoke(app, [*arguments])


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["x"], Options(Path("x"))),
        (["x", "--kind", "two", "-q"], Options(Path("x"), kind="two", quiet=True)),
        (["x", "--columns", "a=b, c=d"], Options(Path("x"), columns={"a": "b", "c": "d"})),
        (["x", "--name", "a", "--name", "b"], Options(Path("x"), names=("a", "b"))),
        (["x", "--numbers", "ab"], Options(Path("x"), numbers=("a", "b"))),
    ],
)
def test_the_function_gets_what_is_typed(arguments, options):
    assert invoke(*arguments).exit_code == 0
    assert made == [options]


def test_the_help_names_each_marked_field_and_no_other():
    text = invoke("--help").output
    assert "Do it." in text
    assert "--columns <str>" in text
    assert "--kind <one|two>" in text
    assert "[default: one]" in text
    assert "label" not in text


def test_a_value_that_is_given_beforehand_is_no_option():
    assert invoke(file=Path("y")).exit_code == 0
    assert made == [Options(Path("y"))]
    assert invoke("x", file=Path("y")).exit_code == 2
    assert made == []


def test_a_parameter_that_is_no_dataclass_is_an_option_in_its_place():
    def both(*, model: Annotated[str, typer.Option()], options: Options) -> None:
        made.append((model, options))

    made.clear()
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(command_of(both))
    assert CliRunner().invoke(app, ["x", "--model", "m"]).exit_code == 0
    assert made == [("m", Options(Path("x")))]
    text = CliRunner().invoke(app, ["--help"]).output
    assert text.index("--model") < text.index("--kind")


def test_columns_are_pairs_of_names():
    assert parse_columns("question=problem, answer=sol") == {"question": "problem", "answer": "sol"}
    with pytest.raises(ConfigError, match="form name=column"):
        parse_columns("question=")
    with pytest.raises(ConfigError, match="one name to two columns"):
        parse_columns("question=problem,question=solution")
