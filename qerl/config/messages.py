"""A pydantic ValidationError as one line: where, which key, what was got, what to write instead."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from qerl.base.errors import ConfigError
from qerl.config.conflict import Conflict
from qerl.config.keys import (
    OTHER_VALUES,
    default_text,
    field_at,
    foreign_key,
    nearest,
    nearest_key,
    paths_below,
    section_at,
    type_text,
)
from qerl.config.yaml_text import Path

SHOWN = 60  # characters of a value that are shown


def to_config_error(error: ValidationError, origins: Mapping[Path, str], source: str) -> ConfigError:
    """The first mistake of a configuration; unknown keys first, since a misspelt key also makes one missing.

    `origins` gives the place (`file:line`, `--set ...`) of each key that was written; the others are in `source`.
    """
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    line = _line(details[0], origins, source)
    places = {detail["loc"] for detail in details}
    around = {place for place in places if any(len(one) > len(place) and one[: len(place)] == place for one in places)}
    more = len(places - around - {details[0]["loc"]})  # a list with a wrong item also counts as too short
    return ConfigError(line + (f" ({more} more after this one)" if more > 0 else ""))


def unknown_key(path: Path, *below: Path) -> str:
    """What an error says of a key that does not exist; it names the nearest one that does.

    `below`: the paths of what was written under it, one of which may be a key of another trainer.
    """
    dotted = ".".join(map(str, path))
    close = nearest_key(path)
    if close is None and (foreign := next(filter(None, (foreign_key(path, rest) for rest in below)), None)):
        dotted, close = foreign
    if close is not None:
        return f"{dotted}: unknown key; did you mean {close}?"
    section = section_at(path[:-1])
    if section is None:
        return f"{dotted}: unknown key; {'.'.join(map(str, path[:-1]))} holds a value, not keys"
    return f"{dotted}: unknown key; the keys here are {', '.join(section.model_fields)}"


def shown(value: object) -> str:
    """A value as an error shows it: in YAML's words, with its kind where that matters, cut to SHOWN characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"{_cut(repr(value))} (text)"
    if isinstance(value, list | tuple):
        return f"the list {_cut(repr(list(value)))}"
    if isinstance(value, dict):
        return f"the mapping {_cut(repr(value))}"
    return _cut(str(value))


def origin_of(path: Path, origins: Mapping[Path, str]) -> str | None:
    """Where a key was written, or else the innermost section or item around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None


def _line(detail: Mapping, origins: Mapping[Path, str], source: str) -> str:
    conflict = detail.get("ctx", {}).get("error")
    if isinstance(conflict, Conflict):
        return f"{_conflict_place(conflict, origins) or source}: {conflict}"
    path = detail["loc"]
    place = origin_of(path, origins) or source
    if detail["type"] == "extra_forbidden":
        return f"{place}: {unknown_key(path, *paths_below(detail['input']))}"
    dotted = ".".join(map(str, path))
    field = field_at(path)
    if detail["type"] == "missing":
        section = section_at(path)
        if section is not None:
            required = [key for key, below in section.model_fields.items() if below.is_required()]
            return f"{place}: {dotted}: missing; write {dotted}: and under it at least {', '.join(required)}"
        return f"{place}: {dotted}: missing; write {dotted} ({type_text(field)}: {field.description})"
    return f"{place}: {dotted}: got {shown(detail['input'])}, expected {_expected(path, field)}{_remedy(detail, field)}"


def _conflict_place(conflict: Conflict, origins: Mapping[Path, str]) -> str | None:
    """Where the first of the keys was written; those on the command line come before those in a file."""
    places = [origins.get(tuple(int(p) if p.isdecimal() else p for p in key.split("."))) for key in conflict.keys]
    written = [place for place in places if place is not None]
    return next((place for place in written if place.startswith("--")), next(iter(written), None))


def _expected(path: Path, field: FieldInfo | None) -> str:
    section = section_at(path)
    if section is not None and (isinstance(path[-1], int) or not _holds_list(field)):
        return f"keys ({', '.join(section.model_fields)})"
    if section is not None:
        return "a list of " + "{" + ", ".join(section.model_fields) + "}"
    text = "text" if field is None else type_text(field)  # None: a value in data.columns
    return text.removeprefix("list of ") if isinstance(path[-1], int) else text


def _remedy(detail: Mapping, field: FieldInfo | None) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "literal_error" and isinstance(value, str):
        if (write := OTHER_VALUES.get((".".join(map(str, detail["loc"])), value))) is not None:
            return f"; write {write}"
        close = nearest(value, detail["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
        return f"; did you mean {close}?" if close else ""
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "on", "no", "off", "y", "n"):
        return f"; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
    if kind in ("int_type", "float_type") and (number := _as_number(value, kind)) is not None:
        return f"; write {number}" + (" without quotes" if isinstance(value, str) and "_" not in value else "")
    if kind == "string_type" and isinstance(value, int | float):
        return f"; write '{str(value).lower()}' in quotes if that text is meant"
    if kind == "string_type" and isinstance(value, dict | list):
        again = f"--set '{'.'.join(map(str, detail['loc']))}=\"...\"'"
        return f"; write text with a colon, brace or bracket in quotes (after --set in a second pair: {again})"
    if kind == "tuple_type" and isinstance(value, str):
        return f"; write [{value if section_at(detail['loc']) is None else _named(value)}]"
    if kind == "model_type" and isinstance(value, str) and isinstance(detail["loc"][-1], int):
        return f"; write {_named(value)}"
    if kind == "model_type":
        return _section_remedy(detail["loc"], value)
    if field is None:
        return ""
    default = default_text(field)
    return f"; the default is {default}" if default != "required" and not isinstance(detail["loc"][-1], int) else ""


def _named(value: str) -> str:
    """The YAML for an item of a list of sections of which only the name was written."""
    return f'{{name: "{value}"}}' if ":" in value else f"{{name: {value}}}"


def _section_remedy(path: Path, value: object) -> str:
    """What to write instead of a single value for a whole section: usually its switch."""
    dotted = ".".join(map(str, path))
    keys = section_at(path).model_fields
    switch = next((key for key in ("enabled", "mode") if key in keys), None)
    if field_at(path).default is None:
        return f"; write keys under it, or {dotted}: null"
    if switch and value in (None, False, "off", "no", "none"):
        return (
            f"; write {dotted}.{switch}: {'false' if switch == 'enabled' else 'off'}, or leave it out for the defaults"
        )
    return "; write keys under it, or leave it out for the defaults"


def _as_number(value: object, kind: str) -> str | None:
    """The number that was probably meant by a text, or by a float where a whole number belongs."""
    if isinstance(value, bool) or not isinstance(value, str | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if kind == "int_type":
        return str(int(number)) if number.is_integer() else None
    return repr(number) if isinstance(value, str) else None


def _holds_list(field: FieldInfo) -> bool:
    return type(field.get_default()) is tuple


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
