"""Examples of a task: the usable rows of its data set or of one's own file; each row left out is counted and named.

A row that cannot be used is left out with its reason, by the rules of usable_rows.py.

Rows of a free-form task (`own`) may have messages in place of a question (qerl/data/messages.py) and need no answer;
their answers are text as it is. If the source has answers, a row without one is left out, unless a grader of the user's
own is to judge it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

from qerl.base.errors import ConfigError, DataError
from qerl.data.alpaca import INSTRUCTION, OUTPUT
from qerl.data.rows import Row, check_hub_id, generated_rows, hub_rows, is_local, local_rows
from qerl.data.tasks import Example, Task
from qerl.data.usable_rows import MISSING, Collector, DropReport, look_up

log = logging.getLogger(__name__)

_PEEK = 100  # rows whose columns are looked at
MEANT = {"prompt": "question", "messages": "question"}  # other names of a column that can be mapped


def load_examples(
    task: Task,
    source: str | None = None,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    keep_unreadable: bool = False,
) -> tuple[list[Example], DropReport]:
    """The usable rows of `source` (hub id, file or folder; None: the task's own data set), at most `limit`.

    A hub id may end in the name of a subset, `owner/name:subset`.

    `columns` maps "question", "answer" and "id" to the source's column names, dots reaching into nested ones. Raises
    DataError if nothing can be read, a column is missing or no row is usable, ConfigError on an impossible request.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}: write a number of rows of at least 1, or leave it out for all")
    name, rows = _open(task, source, split)
    first = list(itertools.islice(rows, _PEEK))
    paths = _find_columns(task, name, columns or {}, first)
    collector = Collector(task, split, paths, keep_unreadable)
    for place, row in itertools.chain(first, rows):
        collector.add(place, row)
    examples, report = collector.finish(name, limit)
    if not examples:
        raise DataError(f"no row can be trained or evaluated on: {report}")
    log.log(logging.WARNING if report.counts else logging.INFO, "%s", report)
    return examples, report


def check_answers(task: Task, examples: Sequence[Example]) -> None:
    """Raise DataError if completions of some of these rows cannot be graded, since there is no answer and no grader."""
    missing = [example.id for example in examples if not example.answer]
    if missing and task.grader is None:
        raise DataError(
            f"{len(missing)} of {len(examples)} rows have no answer (e.g. {', '.join(missing[:3])}), so that nothing "
            "can be graded: name its column with --columns answer=NAME (a recipe: data.columns), or give a grader "
            "of your own with --grader FILE.py (a recipe: data.grader)"
        )


def check_source(
    task: Task, source: str | None = None, split: str = "train", columns: Mapping[str, str] | None = None
) -> None:
    """Raise what `load_examples` would raise on the first rows: no such file, no rows, a missing column.

    Of a hub id only the form is checked, as fetching takes long. Rows that a task makes itself are not checked.
    """
    if source is None or source == task.hub:
        _check_own(task, split)
    elif is_local(source):
        _find_columns(task, source, columns or {}, list(itertools.islice(local_rows(source, split), _PEEK)))
    else:
        check_hub_id(source.partition(":")[0])


def _open(task: Task, source: str | None, split: str) -> tuple[str, Iterator[Row]]:
    """The name of the source for messages, and its rows."""
    if source is not None and is_local(source):
        return source, local_rows(source, split)
    if source is not None and source != task.hub:
        name, _, subset = source.partition(":")
        return source, hub_rows(name, subset or None, split)
    _check_own(task, split)
    if task.generate is not None:
        return f"task {task.name} ({split})", generated_rows(task.generate(split))
    return task.hub, hub_rows(task.hub, task.hub_config, task.splits[split])


def _check_own(task: Task, split: str) -> None:
    if split not in task.splits:
        known = " and ".join(task.splits)
        raise DataError(f"task {task.name} has no split {split!r}, only {known}: pass your own rows with --data FILE")
    if task.generate is None and task.hub is None:
        raise DataError(f"task {task.name} has no data set of its own: pass your rows with --data FILE")


def _find_columns(task: Task, source: str, asked: Mapping[str, str], rows: list[Row]) -> dict[str, str]:
    """The source's columns for question, answer and id: those asked for, else the task's, else ours by name."""
    unknown = sorted(set(asked) - {"question", "answer", "id", *MEANT})
    if unknown:
        raise ConfigError(f"columns maps {unknown[0]!r}, which is unknown: only question, answer and id can be mapped")
    present = [row for _, row in rows if row is not None]
    if not present:
        raise DataError(f"{source} holds no rows: is it the right file, and in the format that its name says?")
    found = {"id": asked.get("id", "id")}
    asked = {MEANT.get(key, key): path for key, path in asked.items()}
    for key in ("question", "answer"):
        own = task.columns[key]
        own = own if key == "question" or found["question"] != INSTRUCTION or not task.free_form else (own, OUTPUT)
        wanted = [asked[key]] if key in asked else [*([own] if isinstance(own, str) else own), key]
        matches = [path for path in wanted if any(look_up(row, path) is not MISSING for row in present)]
        if not matches and key == "answer" and key not in asked and task.free_form:
            continue
        if not matches:
            names = ", ".join(dict.fromkeys(str(name) for row in present for name in row))
            raise DataError(
                f"{source} has no column {' or '.join(map(repr, dict.fromkeys(wanted)))} for the {key} (its columns: "
                f"{names}); map them, for example --columns question=problem,answer=solution "
                "(a recipe: data.columns: {question: problem, answer: solution})"
            )
        found[key] = matches[0]
    return found
