"""Configuration data while it is put together from recipe, base recipe, `--set` and flags, each key with its origin.

A mapping given for a section merges into it key by key; everything else (numbers, lists, data.columns) replaces what
was there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qerl.base.errors import ConfigError
from qerl.config.conflict import Conflict
from qerl.config.keys import field_at, is_list, is_mapping, paths_below, section_at
from qerl.config.messages import shown, unknown_key
from qerl.config.quant import expanded
from qerl.config.rules_rewards import may_hold_key
from qerl.config.yaml_text import Path, YamlError, parse

QUANT_CFG = ("qat", "quant_cfg")


@dataclass
class Draft:
    """`origins` maps a key to where it was written, `file:line` or `--set ...`. `source` is the file, which errors name
    for a missing key."""

    source: str
    data: dict = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)

    def merge(self, data: dict, origins: dict[Path, str]) -> None:
        """Merge a recipe over this one. Unknown keys are kept: the validation reports them."""
        for key, value in data.items():
            self._assign((key,), value, origins.get)

    def override(self, text: str) -> None:
        """Apply one `a.b=c`: c is YAML, a.b may hold list indices (`rewards.0.weight`). Raises ConfigError."""
        key, equals, value_text = (part.strip() for part in text.partition("="))
        # Errors show the origin, and a header or a URL may hold a secret.
        secret = "headers" in text or ("://" in text and ("@" in text or "?" in text)) or may_hold_key(text)
        origin = f"--set {key}=..." if secret else f"--set {text}"
        if not equals or not key:
            raise ConfigError(f"{origin}: is not KEY=VALUE; write --set section.key=value")
        if not value_text:
            raise ConfigError(
                f"{origin}: has no value; write --set {key}=null, or --set {key}='\"\"' for an empty text"
            )
        try:
            value = parse(value_text).data
        except YamlError as error:
            raise ConfigError(
                f"{origin}: {error}; text that is not YAML goes in quotes: --set '{key}=\"...\"'"
            ) from None
        self.put(key, value, origin)

    def put(self, key: str, value: object, origin: str) -> None:
        """Set one dotted key. Raises ConfigError if there is no such key or item."""
        path: Path = ()
        parts = key.split(".")
        for index, part in enumerate(parts):
            below = [(*parts[index + 1 :], *under) for under in paths_below(value)]
            path = (*path, self._step(path, part, below, origin))
        self._assign(path, value, lambda _: origin)

    def _step(self, parent: Path, part: str, below: list[Path], origin: str) -> str | int:
        """One part of a dotted key as the data holds it: a key of a mapping, or the number of a list item. `below` are
        the paths of what is written under it, for an error."""
        holder = field_at(parent)
        of_items = holder is not None and is_list(holder) and not isinstance(parent[-1], int)
        if not of_items and field_at((*parent, part)) is None and not self._is_free(parent):
            raise ConfigError(f"{origin}: {unknown_key((*parent, part), *below)}")
        container = self._container((*parent, part))
        if isinstance(container, dict):
            return part
        if part.isdecimal() and int(part) < len(container):
            return int(part)
        dotted = ".".join(map(str, parent))
        numbers = f"0 to {len(container) - 1}" if container else "none"
        raise ConfigError(
            f"{origin}: {dotted} is a list, item {part} is not in it; write {dotted}.N with N an item's "
            f"number ({numbers}), or the whole list: --set '{dotted}=[...]'"
        )

    def _is_free(self, path: Path) -> bool:
        """Whether the path lies in a mapping with keys of the user's own (data.columns, rewards.N.args)."""
        fields = (field_at(path[:length]) for length in range(1, len(path) + 1))
        return any(is_mapping(found) for found in fields if found is not None)

    def _assign(self, path: Path, value: object, origin: Callable[[Path], str | None]) -> None:
        section = section_at(path)
        merges = section is not None and not (is_list(field_at(path)) and not isinstance(path[-1], int))
        if merges and isinstance(value, dict) and (value or isinstance(self._container(path).get(path[-1]), dict)):
            for key, inner in value.items():
                self._assign((*path, key), inner, origin)
            return
        self._container(path)[path[-1]] = value
        for old in [old for old in self.origins if old[: len(path)] == path]:
            del self.origins[old]
        self._note(path, value, origin)

    def _note(self, path: Path, value: object, origin: Callable[[Path], str | None]) -> None:
        if (place := origin(path)) is not None:
            self.origins[path] = place
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            self._note((*path, key), inner, origin)

    def _container(self, path: Path) -> dict | list:
        """The mapping or list that holds the last part of the path; made from the defaults if it was not written."""
        container: dict | list = self.data
        for length in range(1, len(path)):
            here, part = path[:length], path[length - 1]
            if isinstance(container, dict) and container.get(part) is None:
                container[part] = _default(here)
            if here == QUANT_CFG and isinstance(container[part], str):
                container[part] = self._keys_of(container[part])  # of which one is to change
            container = container[part]
            if not isinstance(container, dict | list):
                place = self.origins.get(here, self.source)
                dotted = ".".join(map(str, here))
                raise ConfigError(f"{place}: {dotted}: got {shown(container)}, expected keys; write them under it")
        return container

    def _keys_of(self, quant_cfg: str) -> object:
        try:
            return expanded(quant_cfg)
        except Conflict as conflict:
            raise ConfigError(f"{self.origins.get(QUANT_CFG, self.source)}: {conflict}") from None


def _default(path: Path) -> dict | list:
    """A list's default as YAML data; anything else is an empty mapping, whose keys have defaults of their own."""
    holder = field_at(path)
    if holder is None or not is_list(holder):
        return {}
    return [item if isinstance(item, str) else item.model_dump() for item in holder.default]
