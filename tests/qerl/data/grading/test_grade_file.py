"""Grading a saved file again: counts by reason, and rows whose stored grade differs."""

import pytest
from rich.console import Console

from qerl.base.errors import ConfigError, DataError
from qerl.data.grading.grade_file import grade_file
from tests.helpers.row_files import write_jsonl


def test_it_gives_counts_accuracy_and_disagreements(tmp_path):
    rows = [
        {"question": "a", "answer": "18", "completion": "\\boxed{18}", "correct": True},
        {"question": "b", "answer": "18", "completion": "\\boxed{180}", "correct": True},
        {"question": "c", "answer": "9*2 is\n#### 18", "completion": "nothing", "correct": False},
        {"question": "d", "answer": 18, "completions": ["#### 18", "\\boxed{[0,1]}"], "correct": [False, False]},
        {"question": "e", "answer": "18", "completion": "The answer is 18."},
    ]
    result = grade_file("gsm8k", write_jsonl(tmp_path / "c.jsonl", rows))
    assert result.accuracy == 3 / 6
    assert result.counts == {"correct": 3, "wrong": 1, "no_answer": 1, "unparsable": 1}
    assert result.graded_before == 5
    assert [(item.place, item.stored, grade.reason) for item, grade in result.disagreements] == [
        ("row 2", True, "wrong"),
        ("row 4, completion 1", False, "correct"),
    ]


def test_the_table_shows_brackets_unchanged(tmp_path):
    rows = [{"answer": "18", "completion": "\\boxed{[/b] [0,1]}", "correct": True}]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(grade_file("gsm8k", write_jsonl(tmp_path / "c.jsonl", rows)).table())
    text = console.export_text()
    assert "'[/b] [0,1]' for '18': unparsable, was correct" in text
    assert "0.0%" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "completion": "x"}, "row 1: a row needs `answer`.*this one has question, completion"),
        ({"answer": "1", "completion": None}, "a row needs"),
        ({"answer": "1", "completions": "text"}, "a row needs"),
        ({"answer": "1", "completions": ["a", "b"], "correct": [True]}, "1 values of `correct` for 2 completions"),
        (["a"], "no JSON object"),
    ],
)
def test_a_row_that_cannot_be_graded_is_named(row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        grade_file("gsm8k", write_jsonl(tmp_path / "c.jsonl", [row]))


def test_a_missing_file_an_empty_file_and_an_unknown_task_are_refused(tmp_path):
    with pytest.raises(DataError, match="no file or folder"):
        grade_file("gsm8k", tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="holds no completions"):
        grade_file("gsm8k", write_jsonl(tmp_path / "c.jsonl", []))
    with pytest.raises(ConfigError, match="no task"):
        grade_file("gsm9k", tmp_path / "c.jsonl")
