"""Environments and tools as a Python call gives them: by name, as a recipe has them, or the objects themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from qerl.base.errors import ConfigError
from qerl.episodes.build import KNOWN, TOOLS, register

Given = str | Callable[..., Any]


def environment_keys(environment: Given | None, tools: Sequence[Given]) -> dict[str, Any]:
    """What a recipe says for them: the objects by their names."""
    found: dict[str, Any] = {} if environment is None else {"environment.name": _name(environment)}
    return found | ({"environment.tools": [_name(tool) for tool in tools]} if tools else {})


@contextmanager
def given_environments(environment: Given | None, tools: Sequence[Given]) -> Iterator[None]:
    """Within it, recipes may name the objects among them. Raises ConfigError for a name that means something else."""
    before = dict(KNOWN), set(TOOLS)
    try:
        for one, is_tool in ((environment, False), *((tool, True) for tool in tools)):
            if one is None or isinstance(one, str):
                continue
            if KNOWN.get(_name(one), one) is not one:
                raise ConfigError(f"{_name(one)!r} is the name of another environment or tool here: rename this one")
            register(_name(one), one, tool=is_tool)
        yield
    finally:
        KNOWN.clear()
        KNOWN.update(before[0])
        TOOLS.clear()
        TOOLS.update(before[1])


def _name(given: Given) -> str:
    if isinstance(given, str):
        return given
    own = getattr(given, "func", given)  # of a functools.partial
    name = getattr(own, "__name__", "")
    if not callable(given) or not name.isidentifier():
        raise ConfigError(
            f"{given!r:.60} is no environment and no tool: give a class or a function with a name, or write its name"
        )
    return name
