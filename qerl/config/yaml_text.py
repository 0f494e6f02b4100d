"""YAML as recipes use it: plain data with line numbers, and no surprises.

PyYAML follows YAML 1.1, in which 1e-5 is text, `off` is false, 010 is 8 and 12:30 is 750. Here, as in YAML 1.2's core
schema: 1e-5, 5E-4 and .5 are numbers; only true and false are booleans; integers are decimal; all else is text.
Duplicate keys, keys that are not text, anchors, tags and several documents are errors. What `dump` writes reads back
as the same data, here and in any YAML 1.1 reader.

ruamel.yaml 0.19 (YAML 1.2) would not make this shorter. It reads 1_000 as 1000, 0x10 as 16 and 2025-11-21 as a date,
resolves aliases, takes keys of any type and writes `no` and 12:30 unquoted, so everything below would have to stay.
"""

import re
from typing import ClassVar, NamedTuple

import yaml

Path = tuple[str | int, ...]  # a key's place in the data: ("rewards", 0, "name")

CHARACTERS, DEPTH = 2**18, 32  # the most that is read

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z"
)
_RESOLVERS = (  # tag, pattern, first characters; the first that matches decides
    ("null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    ("int", re.compile(r"[-+]?[0-9]+\Z"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)
_SCALARS = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
    "str": str,
}


class YamlError(ValueError):
    """Text that is not usable YAML; `line` counts from 1, None where it has no place."""

    def __init__(self, message: str, line: int | None) -> None:
        self.line = line
        super().__init__(message)


class Parsed(NamedTuple):
    """The data of a text, and the line (from 1) of every key and list item in it."""

    data: object
    lines: dict[Path, int]


class _Loader(yaml.SafeLoader):
    """SafeLoader's scanner and parser with the resolvers above. It makes nodes only; `_build` makes the values."""

    yaml_implicit_resolvers: ClassVar[dict] = {}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise YamlError("an anchor or alias (& or *); write the value out, or quote it if it is text", line)
        self._depth += 1
        if self._depth > DEPTH:
            raise YamlError(
                f"brackets or indents nested too deeply (more than {DEPTH}); write a flat list or mapping", line
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """SafeDumper without aliases that quotes text which is a number here (1e-5) or holds unusual line breaks."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        odd = any(character in text for character in "\x85\u2028\u2029")  # outside "" they read as spaces
        return self.represent_scalar(_TAG + "str", text, style='"' if odd else None)


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _tag, _pattern, _first)
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def parse(text: str) -> Parsed:
    """Read one YAML document. Raises YamlError with the line of the first mistake."""
    if len(text) > CHARACTERS:  # PyYAML reads about 100 kB per second
        raise YamlError(f"more than {CHARACTERS} characters; a recipe has a few thousand", None)
    lines: dict[Path, int] = {}
    try:
        node = yaml.compose(text, Loader=_Loader)
        return Parsed(None if node is None else _build(node, (), lines), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(_explain(error), mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(
            f"the character U+{ord(text[error.position]):04X} cannot stand in YAML; remove it", line
        ) from None


def dump(data: object) -> str:
    """Write data so that `parse` returns the same; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _build(node: yaml.Node, path: Path, lines: dict[Path, int]) -> object:
    line = node.start_mark.line + 1
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.MappingNode) and kind == "map":
        return _build_mapping(node, path, lines)
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        for i, item in enumerate(node.value):
            lines[(*path, i)] = item.start_mark.line + 1
        return [_build(item, (*path, i), lines) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and kind in _SCALARS:
        try:
            return _SCALARS[kind](node.value)
        except ValueError:
            raise YamlError(
                f"{node.value[:40]!r} is not a {kind}; leave out the tag, or write a number", line
            ) from None
    raise YamlError(f"the tag {node.tag!r}; write the plain value without a tag", line)


def _build_mapping(node: yaml.MappingNode, path: Path, lines: dict[Path, int]) -> dict[str, object]:
    data: dict[str, object] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
            shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            raise YamlError(f"{shown} stands where a key belongs; write a key as text, such as `steps: 10`", line)
        key = key_node.value
        dotted = ".".join(map(str, (*path, key)))
        if key in data:
            first = lines[(*path, key)]
            raise YamlError(f"{dotted} stands twice (first in line {first}); keep one of the two", line)
        lines[(*path, key)] = line
        data[key] = _build(value_node, (*path, key), lines)
    return data


def _explain(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "cannot be read"
    if "expected a single document" in str(error):
        return "a second document begins here (---); write one document"
    return f"not YAML: {problem}; write spaces for tabs, align the keys, and quote text with colons or brackets"
