"""HTTP headers of a recipe, in which `${NAME}` stands for a variable of the environment.

The recipe, and all that a run writes, keep `${NAME}`; the value is put in when a request is sent, and taken out of
whatever the server says that is shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from qerl.base.errors import ConfigError
from qerl.config.rewards import VARIABLE, header_mistake


@dataclass(frozen=True)
class Headers:
    """The headers as the recipe has them."""

    given: Mapping[str, str] = field(default_factory=dict)

    def expanded(self) -> dict[str, str]:
        """The headers to send."""
        return {name: VARIABLE.sub(lambda found: os.environ[found[1]], value) for name, value in self.given.items()}

    def hidden(self, text: str) -> str:
        """`text` with each variable's value replaced by its name: a server may repeat the key that it refuses."""
        names = {name for value in self.given.values() for name in VARIABLE.findall(value)}
        values = {name: os.environ[name] for name in names if os.environ.get(name)}
        for name in sorted(values, key=lambda name: -len(values[name])):
            text = text.replace(values[name], f"${{{name}}}")
        return text


def check_headers(who: str, given: object) -> Headers:
    """The headers of `who`, such as "reward judge". Raises ConfigError, never with a value, if one cannot be sent."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{who}: args.headers is no mapping: write for example {{Authorization: "Bearer ${{GRADER_KEY}}"}}'
        )
    for name, value in given.items():
        if mistake := header_mistake(name, value):
            raise ConfigError(f"{who}: args.headers.{name}: {mistake[0]}; write {mistake[1]}")
        for variable in VARIABLE.findall(value):
            held = os.environ.get(variable)
            if not held:
                state = "is not set in" if held is None else "is empty in"
                raise ConfigError(
                    f"{who}: args.headers.{name} names ${{{variable}}}, which {state} the environment: "
                    f"`export {variable}=...`, then start again"
                )
            if not (held.isascii() and held.isprintable()):
                raise ConfigError(
                    f"{who}: args.headers.{name} names ${{{variable}}}, whose value has a line break or another "
                    f"character that no header can hold: `export {variable}=...` without it"
                )
    return Headers(dict(given))
