"""`qerl.sft`: supervised fine-tuning, in a script or a notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict, Unpack

from qerl.api.arguments import Rows, check_keywords
from qerl.api.recipe import Recipe
from qerl.api.training import train
from qerl.base.errors import ConfigError

if TYPE_CHECKING:
    from qerl.api.run import Run


class SftArguments(TypedDict, total=False):
    """The further arguments of `qerl.sft`. They mean what the options of `qerl sft` mean."""

    model: str | os.PathLike | Run  # base, NVFP4 folder, run or adapter; default: the recipe's
    task: str  # whose columns and solutions are read; default: the recipe's
    columns: Mapping[str, str]  # of data: {"question": "instruction", "answer": "output"}
    system_prompt: str  # for conversations without one
    steps: int  # optimizer steps; with `resume` the run's new number in all
    seed: int
    out: str | os.PathLike  # run directory; default: runs/<recipe>-<time>
    quantize: bool  # quantize the base first if that has not been done
    gpu: int  # card of this machine; default: that with the most free memory
    accept_changes: bool  # with `resume`: continue although rows or packages changed


def sft(
    recipe: Recipe | str | os.PathLike | None = None,
    *,
    data: str | os.PathLike | Rows | None = None,
    resume: Run | str | os.PathLike | None = None,
    **arguments: Unpack[SftArguments],
) -> Run:
    """Let a model learn from conversations by a recipe, or continue the run `resume`; returns the run.

    `data` are rows with `messages`, or with `prompt` and `completion`, or the path of a file with such rows
    (docs/sft.md). A recipe without the section `sft` gets one with its defaults. Otherwise it is as `qerl.train`, and
    `qerl.train(..., model=run)` goes on from what was learned.
    """
    check_keywords(arguments, [*SftArguments.__annotations__], "qerl.sft")
    if resume is not None:
        return train(recipe, data=data, resume=resume, **arguments)
    if recipe is None:
        raise ConfigError("no recipe was given: write qerl.sft('sft_tiny'), or qerl.sft(resume=RUN); see qerl recipes")
    chosen = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    return train(chosen if chosen.config.sft is not None else chosen.set({"sft": {}}), data=data, **arguments)
