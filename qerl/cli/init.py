"""`qerl init`: a recipe, a grader and a reward for somebody's own rows, to be read and changed. Nothing here imports
torch."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qerl import formats
from qerl.base.devices import installed_cards
from qerl.base.errors import ConfigError
from qerl.base.files import expanded, in_one_step, is_path, no_folder
from qerl.base.printable import in_comment, quoted
from qerl.cli.next_step import DEFAULT_RECIPE, say_next
from qerl.cli.train import recipe_values
from qerl.data.option_text import Text, parse_columns

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from qerl.data.guess import Guess

logger = logging.getLogger(__name__)

RECIPE, GRADER, REWARDS = "recipe.yaml", "grader.py", "rewards.py"
LONGEST_NAME = 60  # characters of a column's name that are shown


@dataclass(frozen=True)
class InitOptions:
    """What is asked of `qerl init`, whose options these are."""

    data: Annotated[str, typer.Argument(help="Your rows: jsonl, json, csv or parquet file, or a folder of them.")]
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: ./NAME, after the file.")] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Recipe to build on. Default: {DEFAULT_RECIPE} where there is a GPU, else tiny.",
            autocompletion=recipe_values,
        ),
    ] = None
    model: Annotated[str | None, typer.Option(help="Base model; default: the recipe's.")] = None
    columns: Annotated[
        Mapping[str, str] | None,
        Text(parse_columns),
        typer.Option(help="Columns of your rows: question=article,answer=topic; default: by their names."),
    ] = None


def init_command(options: InitOptions) -> None:
    """Write a commented recipe, a grader and a reward for your own rows, from a look at them."""
    from qerl.config.recipe import load_recipe

    folder = init(options)
    recipe = folder / RECIPE
    typer.echo(f"{folder}: {RECIPE}, {GRADER}, {REWARDS}; read and change them")
    say_next(f"qerl train --recipe {shlex.quote(str(recipe))}{_quantize(load_recipe(recipe))} --dry-run")


def init(options: InitOptions) -> Path:
    """The folder that was written.

    Raises DataError for rows that cannot be used, ConfigError for a recipe that cannot, or a folder that is there.
    """
    from qerl.config.recipe import load_recipe
    from qerl.data.guess import guess

    if options.model is not None and is_path(options.model) and not os.path.isdir(expanded(options.model)):
        raise ConfigError(f"--model: {no_folder(options.model)}: give an existing folder or a hub id")
    found = guess(options.data, options.columns)
    base = options.recipe or (DEFAULT_RECIPE if installed_cards() else "tiny")
    # Named after the rows' file, without characters that mean something to a shell, YAML or Python.
    name = re.sub(r"[^\w -]", "_", Path(options.data).name.partition(".")[0]).strip(" -")
    folder = options.out or Path(name or "mine")
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists and is left as it is: write another --out")
    _check_encodable(options.data, str(folder))
    config = load_recipe(base, base=options.model)
    if not config.kind.samples:
        raise ConfigError(
            f"recipe {base} learns from given conversations and needs no grader: run `qerl sft --recipe {base} --data "
            f"{shlex.quote(options.data)}`, or build on a recipe that samples, such as tiny"
        )
    logger.info(
        "%s: %d rows, asked by %s, answered by %s (%s)",
        *(options.data, found.rows, found.question, found.answer or "no column", _KINDS[found.kind]),
    )
    try:
        texts = {RECIPE: _recipe(folder, expanded(options.data), base, found, config)}
        texts |= {GRADER: _GRADERS[found.kind], REWARDS: _SHORT}  # no name of the rows becomes code
        with in_one_step(folder) as aside:
            for name, text in texts.items():
                (aside / name).write_text(text, encoding="utf-8")
            load_recipe(aside / RECIPE)
            aside.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}): write another --out") from error
    return folder


def _check_encodable(*names: str) -> None:
    """Raise ConfigError for names of files that are not text, which no recipe can name."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{name!r} has bytes that are no text in UTF-8: rename it") from None


_KINDS = {"number": "numbers", "text": "text", "none": "no answers"}


def _quantize(config: RunConfig) -> str:
    """The option that a first run on the recipe's base needs, if any."""
    return " --quantize" if not config.kind.packs and formats.get(config.model.format).scheme else ""


_RECIPE = """\
# Training on {name}: {rows} rows, asked by the column {question}, answered by {answer}.
#
#   qerl train --recipe {recipe}{quantize} --dry-run    # the plan, the prompts, the rewards of five rows
#   qerl train --recipe {recipe}{quantize}
#
# Written by `qerl init` as a beginning. Keys that are not here have the values of the recipe that it extends
# (`qerl recipes show {shown}`); `qerl recipes keys` lists them all. Paths are from where a command is typed.

extends: {base}

model:
  base: {model}    # a hub id or a folder; `qerl plan` says whether it fits your card

data:
  task: own                  # your prompts as they stand; nothing is added to them
  source: {source}
{columns}\
  # further columns: {further}
  # system_prompt: "Reason step by step. End with the answer alone on the last line."
  # prompt_template: "{{question}}\\n\\nEnd with the answer."
  max_prompt_tokens: {max_prompt_tokens}     # longer prompts are left out; the dry run counts them
{grader}
rewards:
{rewards}
rollout:
  prompts_per_step: {prompts}{fewer}

# validation:                # questions that the run answers between its steps; keep rows aside for them
#   every: 20
#   source: held-out.jsonl

# run:
#   steps: {steps}
"""
_GRADED = """\
  - name: accuracy           # 1 where the grader says that the completion is right
  - name: {place}
    weight: 0.1              # small: it decides between completions that are right, or wrong, alike
"""
_UNGRADED = """\
  - name: {place}    # your rows have no answers: write what you want into this function
"""


def _recipe(folder: Path, data: Path, base: str, found: Guess, config: RunConfig) -> str:
    from qerl.config.recipe import recipe_names

    needed = config.rollout.prompts_per_step
    place = quoted(f"{folder / REWARDS}:short")
    grader = f"  grader: {quoted(str(folder / GRADER))}    # says whether a completion is right\n"
    return _RECIPE.format(
        name=in_comment(data.name),
        rows=found.rows,
        question=quoted(found.question),
        answer=quoted(found.answer) if found.answer else _SPOKEN[found.kind],
        recipe=in_comment(shlex.quote(str(folder / RECIPE))),
        quantize=_quantize(config),
        shown=in_comment(base),
        base=base if base in recipe_names() else quoted(os.path.relpath(base, folder)),
        model=quoted(config.model.base),
        source=quoted(str(data)),
        further=_further(found),
        columns=f"  columns: {json.dumps(found.columns)}\n" if found.columns else "",
        max_prompt_tokens=config.data.max_prompt_tokens,
        grader="" if found.kind == "none" else grader,
        rewards=(_UNGRADED if found.kind == "none" else _GRADED).format(place=place),
        prompts=min(needed, found.rows),
        fewer=f"        # {in_comment(base)} has {needed}; there are no more rows" if found.rows < needed else "",
        steps=config.run.steps,
    )


_SPOKEN = {"none": "nothing", "number": "the assistant's last message", "text": "the assistant's last message"}


_NUMBER = '''"""Says whether a completion is right."""

import re

# `qerl eval` takes this file too: --grader FILE

NUMBER = re.compile(r"-?\\d[\\d,]*(?:\\.\\d+)?")


def grade(completion, answer):
    """The last number of the completion is the last one of the row's answer."""
    numbers = [NUMBER.findall(text) for text in (completion, answer)]
    if not all(numbers):
        return False
    given, expected = (float(found[-1].replace(",", "")) for found in numbers)
    return given == expected
'''

_TEXT = '''"""Says whether a completion is right."""

# `qerl eval` takes this file too: --grader FILE


def grade(completion, answer):
    """The completion's last line is the row's answer, whatever the case and the white space. A number from 0 to 1 would
    do as well, for an answer that is half right."""
    lines = [line for line in completion.splitlines() if line.strip()]
    return bool(lines) and _plain(lines[-1]) == _plain(answer)


def _plain(text):
    return " ".join(text.casefold().split()).strip(" .")
'''

_NONE = '''"""Would say whether a completion is right. Your rows have no answers, so the recipe does not name this file.

Where a completion shows by itself whether it is right, write how, and add `grader: FILE` to data and `- name: accuracy`
to rewards in the recipe.
"""


def grade(completion, question):
    """Whether the completion is right: a bool, or a number from 0 to 1."""
    raise NotImplementedError("write what is right")
'''

_SHORT = '''"""A reward of your own. It takes columns by name: completions, completion_ids, prompts, question, answer,
step, max_new_tokens, and every further column of your rows, which the recipe lists."""


def short(completions, completion_ids, max_new_tokens, **columns):
    """1 for a completion without a token, falling to 0 at the longest one."""
    return [1 - len(ids) / max_new_tokens for ids in completion_ids]
'''


_GRADERS = {"number": _NUMBER, "text": _TEXT, "none": _NONE}


def _further(found: Guess) -> str:
    """The columns that graders and rewards get besides: identifiers as they stand, others in quotes."""
    used = {found.question.split(".")[0], (found.answer or "").split(".")[0]}
    others = [str(name)[:LONGEST_NAME] for name in found.sample if name not in used]
    shown = [name if name.isidentifier() else quoted(name) for name in others[:8]]
    return ", ".join(shown) or "there are none"
