"""Grades a file of saved completions again, for `qerl grade --task T FILE`.

Each line has an `answer`, a `completion` (one text) or `completions` (several), and possibly the `question`. The
completions.jsonl of an evaluation is such a file. If a line also stores a grade (`correct`), the new grade is compared
with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from qerl.base.errors import DataError
from qerl.base.own_function import TIMEOUT_S
from qerl.data.examples import final_answer
from qerl.data.grading.grade import Grade, check_grader, grade_many
from qerl.data.rows import is_empty, local_rows
from qerl.data.tasks import Task, get_task, with_grader

_SHOWN = 10
_CHARS = 60
_READ = ("completion", "completions", "answer", "question", "correct")


@dataclass(frozen=True)
class Item:
    """A completion of the file. `others` are the row's other columns, which a grader of the user's own may read."""

    place: str
    completion: str
    answer: str
    stored: bool | None
    question: str | None
    others: Mapping[str, Any]


@dataclass(frozen=True)
class FileGrades:
    """The grades of a file, in order. `graded_before` counts the completions that had a stored grade, and
    `disagreements` are those with another one."""

    task: str
    path: Path
    grades: tuple[Grade, ...]
    graded_before: int
    disagreements: tuple[tuple[Item, Grade], ...]

    @property
    def accuracy(self) -> float:
        """Share of correct completions; if a line has several completions, each counts by itself."""
        return sum(grade.correct for grade in self.grades) / len(self.grades)

    @property
    def counts(self) -> dict[str, int]:
        """Number of completions by reason (one of which is "correct"), the most frequent first."""
        return dict(Counter(grade.reason for grade in self.grades).most_common())

    def table(self) -> Table:
        """A table of the counts, the accuracy and the first disagreements with stored grades."""
        # Answers contain brackets, which rich reads as markup in a plain string.
        table = Table("grade", "completions", "share", "detail", title=Text(f"{self.path} as {self.task}"))
        for reason, count in self.counts.items():
            table.add_row(reason, str(count), f"{count / len(self.grades):.1%}", "")
        table.add_section()
        table.add_row("accuracy", str(len(self.grades)), f"{self.accuracy:.1%}", "")
        if self.graded_before:
            share = len(self.disagreements) / self.graded_before
            table.add_row("differ from stored", str(len(self.disagreements)), f"{share:.1%}", "")
        for item, grade in self.disagreements[:_SHOWN]:
            stated, answer = (grade.extracted or "")[:_CHARS], item.answer[:_CHARS]
            was = "correct" if item.stored else "not correct"
            table.add_row("", item.place, "", Text(f"{stated!r} for {answer!r}: {grade.reason}, was {was}"))
        return table


def graded_by(task: str, grader: str | None) -> Task:
    """The task of this name, graded by a function of the user's own if one is named. Raises ConfigError."""
    named = with_grader(get_task(task), grader, TIMEOUT_S)
    check_grader(named)
    return named


def grade_file(task: Task | str, path: str | Path) -> FileGrades:
    """Grade all completions of a file (jsonl, json, csv or parquet). Raises DataError for the first unusable row."""
    task = get_task(task)
    items = [item for place, row in local_rows(str(path), "test") for item in _items(task, path, place, row)]
    if not items:
        raise DataError(f"{path} holds no completions: is it the right file?")
    columns = ("completion", "answer", "question")
    completions, answers, questions = ([getattr(item, name) for item in items] for name in columns)
    names = dict.fromkeys(name for item in items for name in item.others)
    others = {name: [item.others.get(name) for item in items] for name in names}
    grades = grade_many(task, completions, answers, questions, others)
    before = [(item, grade) for item, grade in zip(items, grades, strict=True) if item.stored is not None]
    differ = tuple((item, grade) for item, grade in before if item.stored != grade.correct)
    return FileGrades(task.name, Path(path), tuple(grades), len(before), differ)


def _items(task: Task, path: str | Path, place: str, row: Mapping[str, Any] | None) -> Iterator[Item]:
    """The completions of one row. `correct` may be a single truth value, or a list of them to match `completions`."""
    if row is None:
        raise DataError(f"{path}, {place}: this is no JSON object; each line has to hold one")
    several = row.get("completions")
    completions = [row.get("completion")] if several is None else several
    texts = isinstance(completions, list) and all(isinstance(text, str) for text in completions)
    if not texts or (is_empty(row.get("answer")) and task.grader is None):
        raise DataError(
            f"{path}, {place}: a row needs `answer`, and `completion` (text) or `completions` (a list of texts); this "
            f"one has {', '.join(map(str, row)) or 'nothing'}"
        )
    given = row.get("answer")
    answer = "" if is_empty(given) else final_answer(str(given), task.answer_kind)
    others = {name: value for name, value in row.items() if name not in _READ}
    stored, question = row.get("correct"), row.get("question")
    grades = stored if isinstance(stored, list) else [stored] * len(completions)
    if len(grades) != len(completions):
        raise DataError(f"{path}, {place}: {len(grades)} values of `correct` for {len(completions)} completions")
    for number, (text, grade) in enumerate(zip(completions, grades, strict=True), start=1):
        where = place if len(completions) == 1 else f"{place}, completion {number}"
        asked = question if isinstance(question, str) else None
        yield Item(where, text, answer, _truth(grade), asked, others)


def _truth(value: Any) -> bool | None:
    """A stored grade: true or false, 1 or 0, or what a CSV file writes for them; None for anything else."""
    return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(str(value).lower())
