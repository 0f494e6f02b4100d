"""What the sections of a RunConfig and their rules have in common. Importing this loads pydantic, nothing heavier."""

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import PydanticCustomError, core_schema

from qerl.base.http import url_mistake, url_shown


class Section(BaseModel):
    """Frozen, no unknown keys, no conversion between types: `"8"` is not 8, and true is not 1.

    One text, or one mapping, stands for a list of it: `report_to: wandb`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        lists = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {key: [each] if key in lists and isinstance(each, str | dict) else each for key, each in data.items()}


@dataclass(frozen=True)
class OneOf:
    """Metadata of an annotated str: `names()` gives what is allowed, and the error is the one that Literal has."""

    names: Callable[[], Sequence[str]]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: object) -> object:
        names = self.names()
        if value not in names:
            expected = " or ".join(repr(name) for name in names)
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value


class Conflict(ValueError):
    """An impossible combination. `values` maps dotted keys to their values; the error names the first one's line."""

    def __init__(self, values: dict[str, object], why: str, write: str) -> None:
        self.keys = tuple(values)
        given = " with ".join(f"{key} {yaml_word(value)}" for key, value in values.items())
        super().__init__(f"{given}: {why}; write {write}")


Conflicts = Iterator[Conflict]


def yaml_word(value: object) -> str:
    """A plain value, a list or a section in YAML's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_word, value))}]"
    if isinstance(value, Section):
        changed = value.model_dump(exclude_defaults=True)
        return "{" + ", ".join(f"{key}: {yaml_word(each)}" for key, each in changed.items()) + "}"
    return repr(value) if isinstance(value, str) and " " in value else str(value)


def unread(config: Section, because: dict[str, object], why: str, *keys: str, other: str = "") -> Conflicts:
    """Keys that others make useless keep their defaults; `other` is what else could be written."""
    for key in keys:
        *path, name = key.split(".")
        section = reduce(getattr, path, config)
        value, default = getattr(section, name), type(section).model_fields[name].get_default(call_default_factory=True)
        if value != default:
            items = value if isinstance(value, tuple) else (value,)
            shown = "given" if any(isinstance(each, Section) for each in items) else value
            given = {key: shown, **because}
            yield Conflict(given, why, f"{key}: {yaml_word(default)}{other and f', or {other}'}")


def unknown(key: str, kind: str, name: str, known: Collection[str], own: str = "") -> Conflict:
    """There is no `kind` of this name: the nearest one, all that are `known`, and how one's `own` is written."""
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    nearest = f"{key}: {near[0]}, or " if near else ""
    other = f", or {own}" if own else ""
    return Conflict({key: name}, f"there is no such {kind}", f"{nearest}one of {', '.join(known)}{other}")


def check_name(key: str, kind: str, name: str, known: Collection[str], own: str) -> Conflicts:
    """The name is known, or has the form of a path to code or of a URL, which are not tried."""
    if "://" in name:
        if mistake := url_mistake(name):
            yield Conflict({key: url_shown(name)}, mistake, "a URL such as http://localhost:8000")
        return
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if name.endswith(".py"):
        yield Conflict({key: name}, "it is a file", f"the name in it too, {name}:NAME")
    elif name not in known and not (place and attribute.isidentifier()):
        yield unknown(key, kind, name, known, own)
