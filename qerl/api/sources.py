"""Tasks, rewards and environments that a Python program gives.

Environments and tools as a Python call gives them: by name, as a recipe has them, or the objects themselves.

Several sources as a Python call gives them: a mapping of names to rows, or to rows with what a source may have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl.api.arguments import Functions, check_keywords, grader_of, is_path, plain_rows, rewards_of
from qerl.api.arguments import GivenRows as Rows
from qerl.base.errors import ConfigError, DataError
from qerl.base.program import rows_file
from qerl.config.data import SourceConfig
from qerl.config.names import ENVIRONMENTS
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
        ENVIRONMENTS.clear()
        ENVIRONMENTS.update(KNOWN)
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


KEYS = ("data", "reward", *(key for key in SourceConfig.model_fields if key not in ("name", "source", "rewards")))
CHAT = ("prompt", "messages")  # columns by which rows show that they bring their own prompt


def is_sources(data: object) -> bool:
    """Whether `data` names several sources. Raises DataError for the splits of a data set, which are none."""
    if type(data).__name__ in ("DatasetDict", "IterableDatasetDict"):
        splits = ", ".join(map(str, data))
        raise DataError(f"data has the splits {splits}: give one of them, such as data['{next(iter(data), 'train')}']")
    return isinstance(data, Mapping)


def sources_of(
    data: Mapping[str, Any], functions: Functions, run_dir: Path
) -> tuple[list[dict[str, Any]], dict[str, Rows]]:
    """`data.sources` for a recipe, and the given rows by the files in `run_dir` that will hold them."""
    if not data:
        raise DataError("data names no source: give {'name': rows, ...}, or the rows themselves")
    sources, given = [], {}
    for name, value in data.items():
        this = dict(value) if isinstance(value, Mapping) else {"data": value}
        check_keywords(this, KEYS, f"source {name}")
        rows = this.pop("data", None)
        own: dict[str, Any] = {"name": str(name)}
        if is_path(rows):
            own["source"] = os.fspath(rows)
        elif rows is not None:
            own["source"] = str(run_dir / rows_file(str(name)))
            given[own["source"]] = plain_rows(rows)
            if "task" not in this and brings_prompts(given[own["source"]], ("question",)):
                own["task"] = "own"
        elif "task" not in this:
            raise ConfigError(f"source {name} has no rows: give data, or a task that has rows of its own")
        if (reward := this.pop("reward", None)) is not None:
            own["rewards"] = rewards_of(reward, functions)
        grader = grader_of(this.pop("grader", None), functions)
        sources.append({**own, **this, **({} if grader is None else {"grader": grader})})
    return sources, given


def brings_prompts(rows: Sequence[Mapping[str, Any]], readable: Sequence[str]) -> bool:
    """Whether rows have prompts or messages, and no column that a task reads its question from."""
    columns = {name for row in rows for name in row}
    return not columns & set(readable) and bool(columns & set(CHAT))
