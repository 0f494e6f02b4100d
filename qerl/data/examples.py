r"""The usable rows of a task, from its data set or from one's own file; each row left out is counted and named.

1. It is not a row (a broken line), or its question or answer is missing, not text, or empty.
2. The task's answers are numbers and this one is not, or no grader can read it (unless `keep_unreadable` is set).
3. An earlier row has the same question and answer, or the row's `dup` column says so.
4. Another row has the same question and another answer (both are left out), or its `conflict` column says so.
5. It is to be trained on, and its `eval_exact` or `eval_near` column names an evaluation set with its question.
6. It has no answer although the source has answers, and no grader of the user's own is to judge it.

A worked solution gives the answer that it marks (`#### N`, `\boxed{...}`). Rows of the task `own` may have messages in
place of a question, and need no answer.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from qerl.base.errors import ConfigError, DataError
from qerl.data.formulas.number import parse_number
from qerl.data.formulas.spelling import strip_math
from qerl.data.grading.extract import extract
from qerl.data.grading.grade import can_be_graded
from qerl.data.messages import (
    INSTRUCTION,
    OUTPUT,
    Asked,
    UnusableError,
    as_messages,
    check_text,
    read_messages,
    read_tools,
    tools_of,
    with_input,
    with_system,
)
from qerl.data.rows import Row, check_hub_id, generated_rows, hub_rows, is_empty, is_local, local_rows, names_of
from qerl.data.tasks import Example, Task, for_episodes, get_task, task_of

if TYPE_CHECKING:
    from qerl.config.data import DataConfig

log = logging.getLogger(__name__)

NAMED = 2  # rows named for each reason
MISSING = object()
Make = Callable[[str], Iterable[Mapping[str, Any]]]  # the rows of a split that a task makes itself
UNREAD = "training takes it with data.task: own and a data.grader, `qerl eval` with --keep-unreadable"


@dataclass(frozen=True)
class DropReport:
    """What became of a source's rows: `total` were read, `kept` are usable, `beyond_limit` of these were not asked for.

    `counts` maps a reason to its number of rows; `named` holds the first few of each, "row 17: the answer is empty".
    """

    source: str
    total: int
    kept: int
    beyond_limit: int
    counts: Mapping[str, int]
    named: tuple[str, ...]

    @property
    def dropped(self) -> int:
        return sum(self.counts.values())

    def without(self, left_out: Mapping[str, Sequence[str]]) -> DropReport:
        """The report after more rows were left out, given as ids by reason."""
        counts = {**self.counts, **{reason: len(ids) for reason, ids in left_out.items()}}
        named = [f"{name}: {reason}" for reason, ids in left_out.items() for name in ids[:NAMED]]
        count = sum(map(len, left_out.values()))
        return replace(self, kept=self.kept - count, counts=counts, named=(*self.named, *named))

    def __str__(self) -> str:
        text = f"{self.kept} of {self.total} rows of {self.source} are usable"
        if self.beyond_limit:
            text += f", the first {self.kept - self.beyond_limit} are used"
        if self.counts:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self.counts.items())
            text += f"; {self.dropped} left out: {reasons}; for example {'; '.join(self.named)}"
        return text


def look_up(row: Mapping[str, Any], path: str) -> Any:
    """The value at a column name, or at a path like "prompt.0.content"; MISSING if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return MISSING
    return value


class Tally:
    """Counts the rows of a source, and notes why rows are left out."""

    def __init__(self) -> None:
        self.total = 0
        self._counts: Counter[str] = Counter()
        self._named: list[str] = []

    @contextmanager
    def taking(self, place: str) -> Iterator[None]:
        """Count a row, which is left out if the block raises UnusableError."""
        self.total += 1
        try:
            yield
        except UnusableError as error:
            self.drop(place, error)

    def drop(self, place: str, error: UnusableError) -> None:
        self._counts[error.reason] += 1
        if self._counts[error.reason] <= NAMED:
            self._named.append(f"{place}: {error}")

    def report(self, source: str, usable: int, limit: int | None, use: str) -> DropReport:
        """Says in a line of the log what became of all rows. Raises DataError if none can be what `use` says."""
        beyond = 0 if limit is None else max(0, usable - limit)
        report = DropReport(source, self.total, usable, beyond, dict(self._counts), tuple(self._named))
        if not usable:
            raise DataError(f"no row can be {use}: {report}")
        log.log(logging.WARNING if report.counts else logging.INFO, "%s", report)
        return report


class Collector:
    """Takes rows one by one and keeps the usable ones in order."""

    def __init__(self, task: Task, split: str, paths: Mapping[str, str], keep_unreadable: bool) -> None:
        self._task, self._split, self._paths = task, split, paths
        self._keep_unreadable = keep_unreadable
        self._answers_optional = task.free_form and ("answer" not in paths or task.grader is not None)
        self._examples: dict[str, tuple[str, Example]] = {}  # question without white space -> place, example
        self._conflicts: set[str] = set()
        self._ids: set[str] = set()
        self.tally = Tally()

    @property
    def usable(self) -> list[Example]:
        return [example for key, (_, example) in self._examples.items() if key not in self._conflicts]

    def take(self, place: str, row: Mapping[str, Any] | None) -> None:
        """Keep the row's example, or raise UnusableError."""
        if row is None:
            raise UnusableError("no readable row")
        asked = self._asked(row)
        question = asked.question
        if self._task.clean_question is not None:
            question = self._task.clean_question(question)
        answer = self._answer(row, asked)
        if is_empty(question) or (is_empty(answer) and not self._answers_optional):
            raise UnusableError(f"empty {'question' if is_empty(question) else 'answer'}")
        answer = "" if is_empty(answer) else answer
        tools = self._tools(row, asked.conversational)
        used = {path.split(".")[0] for path in self._paths.values()}
        extra = {column: value for column, value in row.items() if column not in used}
        graded_by = {} if answer or not self._task.free_form else extra  # without an answer by its columns, if by any
        key = place if self._task.may_repeat else _key(question, asked, tools, graded_by)
        earlier = self._examples.get(key)
        if earlier is not None and earlier[1].answer == answer:  # the hub's DAPO-Math has each row 100 times
            raise UnusableError("duplicate", f"duplicate of {earlier[0]}")
        if self._task.answer_kind == "number" and parse_number(answer) is None:
            raise UnusableError("answer that is no number", f"the answer {answer[:40]!r} is no number")
        if self._task.answer_kind == "math" and not self._keep_unreadable and not can_be_graded(answer, "math"):
            raise UnusableError("answer that cannot be read", f"the answer {answer[:40]!r} cannot be read: {UNREAD}")
        _check_flags(row, self._split)
        if earlier is not None:
            self._compare(place, answer, key)
        name = self._identify(place, look_up(row, self._paths["id"]))
        asks = asked.earlier, asked.beside, tools, asked.conversational
        self._examples[key] = place, Example(question, answer, name, extra, *asks)

    def _asked(self, row: Mapping[str, Any]) -> Asked:
        """The question of a row, and the messages before and after it."""
        path = self._paths["question"]
        if self._task.free_form:
            others = [name for name in self._task.columns["question"] if row.get(name) is not None]
            if not _holds(row, path):
                path = next((name for name in others if not is_empty(row[name])), next(iter(others), path))
            if (cell := as_messages(look_up(row, path))) is not None:
                asked = read_messages(cell)
                return replace(asked, earlier=tuple(with_system(row, asked.earlier)))
        elif isinstance(cell := look_up(row, path), str) and as_messages(cell) is not None:
            raise UnusableError("question that is no text", "the question is a list of messages; --task own asks them")
        text = _text(row, path, "question")
        check_text(text, path)
        return Asked(with_input(row, path, text, self._paths.get("answer")), tuple(with_system(row, ())))

    def _tools(self, row: Mapping[str, Any], conversational: bool) -> tuple[Mapping[str, Any], ...]:
        """The schemas of the column `tools`. In rows without messages it may be a column that rewards read."""
        if conversational:
            return tools_of(row)
        try:
            return read_tools(row.get("tools"))
        except UnusableError:
            return ()

    def _answer(self, row: Mapping[str, Any], asked: Asked) -> str:
        if "answer" not in self._paths:
            return asked.reply
        if self._answers_optional and not _holds(row, self._paths["answer"]):
            return asked.reply
        return final_answer(_text(row, self._paths["answer"], "answer"), self._task.answer_kind)

    def _identify(self, place: str, own: Any) -> str:
        """The row's own id, or else its number; made unique by the number if an earlier row has it."""
        name = place.removeprefix("row ") if own is MISSING or is_empty(own) else str(own)
        while name in self._ids:
            name = f"{name}@{place.removeprefix('row ')}"
        self._ids.add(name)
        return name

    def _compare(self, place: str, answer: str, key: str) -> None:
        """Raise on a question that stands in an earlier row, with the same answer or with another."""
        earlier_place, earlier = self._examples[key]
        if _same_answer(earlier.answer, answer):
            raise UnusableError("duplicate", f"duplicate of {earlier_place}")
        reason = "question with two answers"
        if key not in self._conflicts:
            self._conflicts.add(key)
            self.tally.drop(earlier_place, UnusableError(reason, f"its question stands in {place} with another answer"))
        raise UnusableError(reason, f"its question stands in {earlier_place} with another answer")


def _key(question: str, asked: Asked, tools: Sequence[Mapping[str, Any]], graded_by: Mapping[str, Any]) -> str:
    """What tells a row's question from others': its text without white space, with all that is asked besides."""
    earlier = [{**message, "content": "".join(message["content"].split())} for message in asked.earlier]
    besides = earlier, asked.beside, tools, graded_by
    key = "".join(question.split())
    return key + json.dumps(besides, sort_keys=True, default=str) if any(besides) else key


def _holds(row: Mapping[str, Any], path: str) -> bool:
    """Whether there is a value at the path that is not empty."""
    value = look_up(row, path)
    return value is not MISSING and not is_empty(value)


def _text(row: Mapping[str, Any], path: str, what: str) -> str:
    """The cell as text. Numbers are written out; lists, objects and booleans are neither questions nor answers."""
    value = look_up(row, path)
    if value is MISSING or value is None:
        raise UnusableError(f"no {what}")
    if is_empty(value):
        raise UnusableError(f"empty {what}", f"the {what} is {value!r}, which is an empty cell")
    if isinstance(value, float) and math.isinf(value):
        raise UnusableError(f"{what} that is no finite number", f"the {what} is {value!r}")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        within = f"; map the text within it, such as {path}.0.content" if isinstance(value, list | Mapping) else ""
        raise UnusableError(f"{what} that is no text", f"the {what} is a {type(value).__name__}{within}")
    text = str(value).strip()
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError(f"{what} that is no valid text", f"the {what} holds half a character") from error
    return text


def final_answer(answer: str, kind: Literal["number", "math", "text"]) -> str:
    """The bare answer of a cell that may hold a worked solution; empty if the solution marks none."""
    if kind != "text" and ("####" in answer or "\\boxed" in answer):
        return extract(answer, kind).text or ""
    return answer


def _check_flags(row: Mapping[str, Any], split: str) -> None:
    """Raise on a row whose own columns say that it should not be used."""
    if row.get("dup") is True:
        raise UnusableError("duplicate", "its `dup` column says that an earlier row has its question")
    if row.get("conflict") is True:
        raise UnusableError("question with two answers", "its `conflict` column says that other answers are in use")
    for column in ("eval_exact", "eval_near") if split == "train" else ():
        if not is_empty(found := row.get(column)) and found:
            first = found[0] if isinstance(found, list) else found
            raise UnusableError("question of an evaluation set", f"its question also stands in {first}")


def _same_answer(one: str, other: str) -> bool:
    numbers = parse_number(one), parse_number(other)
    if None not in numbers:
        return numbers[0].equals(numbers[1])
    return strip_math(one).replace(" ", "") == strip_math(other).replace(" ", "")


PEEK = 100  # rows whose columns are looked at
MEANT = {"prompt": "question", "messages": "question"}  # other names of a column that can be mapped


def examples_of(data: DataConfig, episodes: bool = False) -> list[Example]:
    """The usable rows of one source of a recipe, those that are held out included."""
    task = for_episodes(task_of(data)) if episodes else task_of(data)
    return load_examples(task, data.source, data.split, data.columns, data.limit)[0]


def load_examples(
    task: Task | str,
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
    task = get_task(task)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}: write a number of rows of at least 1, or leave it out for all")
    name, rows = open_rows(task, task.generate, source, split)
    first = list(itertools.islice(rows, PEEK))
    paths = _find_columns(task, name, columns or {}, first)
    collector = Collector(task, split, paths, keep_unreadable)
    for place, row in itertools.chain(first, rows):
        with collector.tally.taking(place):
            collector.take(place, row)
    usable = collector.usable
    report = collector.tally.report(name, len(usable), limit, "trained or evaluated on")
    return usable[:limit], report


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
    """Raise what `load_examples` would raise on the first rows: no such file, no rows, a missing column."""
    check_rows(task, task.generate, source, split, lambda rows: _find_columns(task, source, columns or {}, rows))


def check_rows(
    task: Task, make: Make | None, source: str | None, split: str, check: Callable[[list[Row]], object]
) -> None:
    """Raise what `open_rows` would raise, and what `check` raises for the first rows of a file or folder.

    Of a hub id only the form is checked, as fetching takes long. Rows that a task makes itself are not checked.
    """
    if source is None or source == task.hub:
        _check_own(task, make, split)
    elif is_local(source):
        check(list(itertools.islice(local_rows(source, split), PEEK)))
    else:
        check_hub_id(source.partition(":")[0])


def open_rows(task: Task, make: Make | None, source: str | None, split: str) -> tuple[str, Iterator[Row]]:
    """The name of the source for messages, and its rows; `make` gives those that the task makes itself."""
    if source is not None and is_local(source):
        return source, local_rows(source, split)
    if source is not None and source != task.hub:
        name, _, subset = source.partition(":")
        return source, hub_rows(name, subset or None, split)
    _check_own(task, make, split)
    if make is not None:
        return f"task {task.name} ({split})", generated_rows(make(split))
    return task.hub, hub_rows(task.hub, task.hub_config, task.splits[split])


def _check_own(task: Task, make: Make | None, split: str) -> None:
    if split not in task.splits:
        known = " and ".join(task.splits)
        raise DataError(f"task {task.name} has no split {split!r}, only {known}: pass your own rows with --data FILE")
    if make is None and task.hub is None:
        raise DataError(
            f"task {task.name} has no such rows of its own: pass yours with --data FILE (a recipe: data.source)"
        )


def present_rows(source: str, rows: Iterable[Row]) -> list[Mapping[str, Any]]:
    """The rows that could be read. Raises DataError if there are none."""
    if present := [row for _, row in rows if row is not None]:
        return present
    raise DataError(f"{source} holds no rows: is it the right file, and in the format that its name says?")


def _find_columns(task: Task, source: str, asked: Mapping[str, str], rows: list[Row]) -> dict[str, str]:
    """The source's columns for question, answer and id: those asked for, else the task's, else ours by name."""
    unknown = sorted(set(asked) - {"question", "answer", "id", *MEANT})
    if unknown:
        raise ConfigError(f"columns maps {unknown[0]!r}, which is unknown: only question, answer and id can be mapped")
    present = present_rows(source, rows)
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
            names = names_of(name for row in present for name in row)
            raise DataError(
                f"{source} has no column {' or '.join(map(repr, dict.fromkeys(wanted)))} for the {key} (its columns: "
                f"{names}); map them, for example --columns question=problem,answer=solution "
                "(a recipe: data.columns: {question: problem, answer: solution})"
            )
        found[key] = matches[0]
    return found
