"""Recipes: a YAML file over the defaults of `schema.py`, then `--set a.b=c`, then flags; each mistake in one line.

The shipped recipes are data files of the package `training.recipes`, found by name through importlib.resources: qerl
imports no code of `training`. A recipe may start with `extends: NAME` (one level) and state only what differs; what
`save_config` writes is always complete. A section merges key by key, everything else is replaced whole.
"""

import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, ValidationError

from qerl.base.errors import ConfigError
from qerl.base.files import read_bytes, read_text, replace_text
from qerl.base.read_back import Shape
from qerl.config import yaml_text
from qerl.config.keys import REMOVED, Draft, drop_removed_, nearest, shown, to_config_error
from qerl.config.schema import RunConfig

logger = logging.getLogger(__name__)


class _Reward(Shape):
    name: str
    weight: FiniteFloat = 1.0


class _Source(Shape):
    name: str | None = None
    rewards: list[_Reward] | None = None


class _Data(Shape):
    sources: list[_Source] | None = None


class _Saved(Shape):
    """What reports and cards read of a configuration."""

    model: dict[str, Any] | None = None
    data: _Data | None = None
    run: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    rewards: list[_Reward] | None = None


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The data and the text of a run's config.yaml. Raises OSError, or ValueError if it is not such a file."""
    text = read_text(path, 4 * yaml_text.CHARACTERS)
    data = yaml_text.parse(text).data
    if not isinstance(data, dict):
        raise ValueError("it holds no sections such as `model:`")
    try:
        _Saved.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return data, text


FLAGS = {  # argument of load_recipe -> the key that it sets, over the recipe and --set, and the name of the option
    "base": ("model.base", "--model"),
    "teacher": ("distill.teacher", "--teacher"),
    "task": ("data.task", "--task"),
    "data": ("data.source", "--data"),
    "grader": ("data.grader", "--grader"),
    "system_prompt": ("data.system_prompt", "--system-prompt"),
    "prompt_template": ("data.prompt_template", "--prompt-template"),
    "environment": ("environment.name", "--environment"),
    "tools": ("environment.tools", "--tools"),
    "engine": ("rollout.engine", "--engine"),
    "steps": ("run.steps", "--steps"),
    "seed": ("run.seed", "--seed"),
    "out": ("run.out", "--out"),
}

Override = str | tuple[str, object] | tuple[str, object, str]


def load_recipe(recipe: str | os.PathLike, overrides: Sequence[Override] = (), **flags: object) -> RunConfig:
    """The configuration of a shipped recipe (by name) or a recipe file, with overrides and flags on top.

    An override is a text `a.b=c`, or a key, its value and perhaps the place that errors name. Flags are the names in
    FLAGS; None means not given.
    Raises ConfigError for whatever is wrong, in one line.
    """
    draft = _read(_find(recipe))
    for override in overrides:
        if isinstance(override, str):
            draft.override(override)
        else:
            key, value, *place = override
            draft.put(key, value, *(place or [f"set {key}"]))
    return _validate(_with_flags(draft, flags))


def load_config(path: str | os.PathLike, evaluated: bool = False, **flags: object) -> RunConfig:
    """The configuration that a run saved, perhaps of an older version, with `flags` as for `load_recipe`. A run that
    is `evaluated` may have been trained by keys that are gone since."""
    draft = _read(Path(path))
    if gone := drop_removed_(draft.data, evaluated):
        _say_gone(path, evaluated, tuple(gone))
    return _validate(_with_flags(draft, flags))


@functools.cache
def _say_gone(path: str | os.PathLike, evaluated: bool, keys: tuple[str, ...]) -> None:
    """One line for a file that is read several times."""
    if not evaluated:
        named = "; ".join(f"{key} ({REMOVED[key].now})" for key in keys)
        logger.info("%s: these keys are gone and are left out: %s", path, named)
        return
    remedy = "; --keep-unreadable keeps rows whose answer cannot be read" if "data.keep_unreadable" in keys else ""
    logger.info("%s: an evaluation does without %s, which this version no longer has%s", path, ", ".join(keys), remedy)


def _with_flags(draft: Draft, flags: Mapping[str, object]) -> Draft:
    for flag, value in flags.items():
        if value is not None:
            key, option = FLAGS[flag]
            draft.put(key, value, f"{option} {value}")
    return draft


def save_config(config: RunConfig, path: str | os.PathLike) -> None:
    """Write every key, so that `load_config(path) == config`; the file appears whole or not at all."""
    replace_text(Path(path), yaml_text.dump(config.model_dump()))


def recipe_names() -> list[str]:
    """Names of the shipped recipes, 7b before 14b."""
    names = [item.name.removesuffix(".yaml") for item in _shipped().iterdir() if item.name.endswith(".yaml")]
    return sorted(names, key=lambda name: [(part.isdigit() and int(part), part) for part in re.split(r"(\d+)", name)])


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe. Raises ConfigError with the nearest name and the list."""
    names = recipe_names()
    if name not in names:
        close = nearest(name, names, 0.5)
        hint = f"did you mean {close}? " if close else ""
        raise ConfigError(f"no recipe is named {name!r}; {hint}shipped are {', '.join(names)}; or give a YAML file")
    return Path(str(_shipped() / f"{name}.yaml"))


def copy_recipe(name: str, out: Path | None = None) -> Path:
    """Write a shipped recipe to `out` (default ./NAME.yaml) as it is, with its `extends`. Never overwrites a file."""
    source = recipe_path(name)
    path = Path(f"{name}.yaml") if out is None else out
    path = path / f"{name}.yaml" if path.is_dir() else path
    try:
        with path.open("xb") as file:
            file.write(source.read_bytes())
    except FileExistsError:
        raise ConfigError(f"{path} exists and is left as it is; write --out FILE, or edit that one") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); write --out FILE") from None
    return path


def recipe_label(recipe: str | os.PathLike) -> str:
    """A recipe's short name, for run directories: `dapo_7b` for the shipped one and for `mine/dapo_7b.yaml`."""
    return Path(recipe).stem


def _shipped() -> Path:
    return Path(str(resources.files("training.recipes")))


def _find(recipe: str | os.PathLike) -> Path:
    text = os.fspath(recipe)
    if not text:
        raise ConfigError(f"the recipe's name is empty; write one of {', '.join(recipe_names())}, or a YAML file")
    if text in recipe_names():
        return recipe_path(text)
    path = Path(text)
    if os.path.exists(path) or path.suffix in (".yaml", ".yml") or path.name != text:
        return path
    if os.path.exists(local := path.with_suffix(".yaml")):  # which also says no of a name that is too long
        raise ConfigError(f"no recipe is named {text!r}, but there is a file: write {local}")
    return recipe_path(text)


def _place(path: Path) -> str:
    """How errors name a recipe file: a shipped one by its place in the project."""
    return f"training/recipes/{path.name}" if path.parent == _shipped() else str(path)


def _read(path: Path, extended: bool = False) -> Draft:
    """A recipe file, merged over the one that it extends; one that is itself `extended` may extend none."""
    place = _place(path)
    try:
        parsed = yaml_text.parse(_read_text(path, place))
    except yaml_text.YamlError as error:
        raise ConfigError(f"{place}:{error.line}: {error}" if error.line else f"{place}: {error}") from None
    if parsed.data is None:
        raise ConfigError(
            f"{place}: is empty; write sections such as model, data and run, or `extends:` and a recipe's name"
        )
    if not isinstance(parsed.data, dict):
        raise ConfigError(f"{place}: holds {shown(parsed.data)}; write sections such as `model:`, with keys under them")
    origins = {key: f"{place}:{line}" for key, line in parsed.lines.items()}
    if "extends" not in parsed.data:
        return Draft(place, parsed.data, origins)
    base = parsed.data.pop("extends")
    where = origins.pop(("extends",))
    if extended:
        raise ConfigError(
            f"{where}: extends: this recipe is itself extended, and one level is all there is; write it out"
        )
    if not isinstance(base, str):
        raise ConfigError(f"{where}: extends: got {shown(base)}, expected one recipe's name or a file beside this one")
    draft = _read(_find_base(base, path, where), extended=True)
    draft.source = place
    draft.merge(parsed.data, origins)
    return draft


def _find_base(base: str, path: Path, where: str) -> Path:
    beside = path.parent / base
    if base not in recipe_names() and beside.is_file():
        return beside
    try:
        return recipe_path(base)
    except ConfigError as error:
        raise ConfigError(f"{where}: extends: {error} that lies beside this one") from None


def _read_text(path: Path, place: str) -> str:
    if os.path.isdir(path):
        config = path / "config.yaml"
        hint = f"write {config}" if config.is_file() else f"write a YAML file or one of {', '.join(recipe_names())}"
        raise ConfigError(f"{place}: is a folder, not a recipe; {hint}")
    try:
        return read_bytes(path, 4 * yaml_text.CHARACTERS).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{place}: no such file; write a YAML file or one of {', '.join(recipe_names())}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: also a null byte in the name
        raise ConfigError(f"{place!r}: cannot be read ({error}); give a file that you may read") from None


def _validate(draft: Draft) -> RunConfig:
    try:
        return RunConfig.model_validate(draft.data)
    except ValidationError as error:
        raise to_config_error(error, draft.origins, draft.source) from None
