"""`qerl.Recipe`: a recipe that is loaded, changed and planned in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import ConfigError
from qerl.config.recipe import load_recipe, recipe_label, save_config
from qerl.config.yaml_text import dump

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig
    from training.preflight.plan import Plan


@dataclass(frozen=True)
class Recipe:
    """A recipe and what was set over it. It never changes: `set` returns another one.

    `config` holds every key with its value, checked: `recipe.config.run.steps`.
    """

    source: str  # name of a shipped recipe, or the path of a YAML file
    changes: tuple[str | tuple[str, object], ...] = ()
    config: RunConfig = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", load_recipe(self.source, self.changes))

    @classmethod
    def load(cls, source: Recipe | str | os.PathLike) -> Recipe:
        """A shipped recipe by its name (`qerl recipes` lists them), a YAML file, or the recipe itself.

        Raises ConfigError.
        """
        if isinstance(source, Recipe):
            return source
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(
                f"{source!r} is no recipe: give the name of one (see qerl recipes), such as 'tiny', or the path of a "
                "YAML file; a run that began before needs resume=RUN alone"
            )
        return cls(os.fspath(source))

    @property
    def name(self) -> str:
        """The name that a run's directory begins with."""
        return recipe_label(self.source)

    def set(self, *changes: str | Mapping[str, object], **sections: object) -> Recipe:
        """The recipe with other values, all of which are checked together.

        A change is a text as `--set` takes it, `"run.steps=10"`, or a mapping, `{"run.steps": 10}`; a keyword is a
        section, `run={"steps": 10}`. Keys that are not named stay. Raises ConfigError, in the words of the command.
        """
        made: list[str | tuple[str, object]] = []
        for change in (*changes, sections):
            if not isinstance(change, str | Mapping):
                raise ConfigError(
                    f"{change!r} is no change: write 'run.steps=10', {{'run.steps': 10}} or run={{'steps': 10}}"
                )
            try:
                made += [change] if isinstance(change, str) else [(key, _plain(value)) for key, value in change.items()]
            except RecursionError:
                raise ConfigError("a value of the change nests too deeply: write a flat list or mapping") from None
        return Recipe(self.source, (*self.changes, *made))

    def plan(self, gpu: str | float | None = None) -> Planned:
        """Memory and seconds of a run on the card `gpu`, such as 24 (GiB) or "4090", as `qerl plan` shows them.

        None means this machine's card, or one of 24 GiB where there is none. Loads no torch.
        """
        from rich.console import Console

        from qerl.cli.plan import plan_of, show
        from training.preflight.advice import likely

        made, text = plan_of(self.config, None if gpu is None else str(gpu)), StringIO()
        show(self.config, made, Console(file=text, width=100, markup=False, emoji=False), likely(self.config))
        return Planned(made, text.getvalue())

    def save(self, path: str | os.PathLike) -> Path:
        """Write every key into a YAML file, which `qerl train --recipe FILE` takes. Raises ConfigError if it cannot."""
        try:
            save_config(self.config, path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): give the path of another file") from error
        return Path(path)

    def __str__(self) -> str:
        return dump(self.config.model_dump())


@dataclass(frozen=True)
class Planned:
    """What a run would take of a card. As text it is what `qerl plan` prints."""

    plan: Plan = field(repr=False)
    text: str = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the run fits the card."""
        return not self.plan.problems

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


def _plain(value: Any) -> Any:
    """The value as YAML would hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
