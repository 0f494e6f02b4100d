"""Several sources as a Python call gives them: a mapping of names to rows, or to rows with what a source may have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.api.arguments import Functions, Rows, check_keywords, grader_of, is_path, plain_rows, rewards_of
from qerl.api.given import rows_file
from qerl.base.errors import ConfigError, DataError
from qerl.config.data import SourceConfig

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
