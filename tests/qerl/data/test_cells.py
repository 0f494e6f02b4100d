"""Empty cells, in all the ways in which data frames and files write them, are neither asked, learned nor paid."""

import json
import math
from decimal import Decimal

import pytest

from qerl.base.errors import DataError
from qerl.data.examples import load_examples
from qerl.data.grading.grade_file import grade_file, graded_by
from qerl.data.guess import guess
from qerl.data.rows import is_empty, without_nulls
from tests.helpers.row_files import write_jsonl, write_parquet

NAN = float("nan")
EMPTY = [None, NAN, "", " \n", "nan", "NaN", "<NA>", [], {}]
FULL = {"prompt": "Name a colour.", "answer": "blue"}


@pytest.mark.parametrize("value", [*EMPTY, Decimal("nan"), Decimal("snan"), ()])
def test_a_cell_without_a_value_is_empty(value):
    assert is_empty(value)


@pytest.mark.parametrize("value", [0, False, 0.0, "0", "NA", "none", "null", "naan", "nan.", [0], {"a": None}])
def test_a_cell_with_a_value_is_not(value):
    assert not is_empty(value)


@pytest.mark.parametrize("value", EMPTY, ids=repr)
def test_an_empty_question_or_answer_is_left_out_and_counted(value, tmp_path):
    rows = [FULL, {"prompt": "Name a shape.", "answer": value}, {"prompt": value, "answer": "square"}]
    examples, report = load_examples("own", write_jsonl(tmp_path / "rows.jsonl", rows))
    assert [example.answer for example in examples] == ["blue"]
    assert (report.dropped, report.counts["no answer" if value is None else "empty answer"]) == (2, 1)


@pytest.mark.parametrize("value", EMPTY, ids=repr)
def test_with_a_grader_it_is_asked_without_an_answer(value, tmp_path):
    (tmp_path / "grader.py").write_text("def grade(completion, answer):\n    return answer == ''\n")
    task = graded_by("own", str(tmp_path / "grader.py"))
    rows = [{"prompt": "Name a shape.", "answer": value}]
    assert [each.answer for each in load_examples(task, write_jsonl(tmp_path / "rows.jsonl", rows))[0]] == [""]
    graded = [{"answer": value, "completion": "x"}]
    assert grade_file(task, write_jsonl(tmp_path / "graded.jsonl", graded)).accuracy == 1


def test_an_infinite_answer_is_left_out(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [FULL, {"prompt": "q", "answer": math.inf}])
    assert load_examples("own", path)[1].counts == {"answer that is no finite number": 1}


def test_numbers_of_parquet_with_a_gap_are_numbers(tmp_path):
    rows = [{"prompt": "1 + 1?", "answer": 2.0}, {"prompt": "1 + 2?", "answer": NAN}, {"prompt": "?", "answer": None}]
    examples, report = load_examples("own", write_parquet(tmp_path / "rows.parquet", rows))
    assert ([each.answer for each in examples], report.dropped) == (["2.0"], 2)


@pytest.mark.parametrize("gap", [NAN, "nan", None], ids=repr)
def test_a_gap_in_other_columns_says_nothing(gap, tmp_path):
    row = {"prompt": gap, "messages": [{"role": "user", "content": "q"}], "answer": "a", "id": gap, "eval_near": gap}
    (example,), _ = load_examples("own", write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert (example.question, example.id) == ("q", "1")


def test_a_saved_completion_without_an_answer_is_refused(tmp_path):
    path = tmp_path / "graded.jsonl"
    path.write_text(json.dumps({"answer": NAN, "completion": "nan"}) + "\n")
    with pytest.raises(DataError, match="row 1: a row needs `answer`"):
        grade_file("gsm8k", path)


def test_a_guess_passes_over_empty_columns(tmp_path):
    rows = [{"prompt": NAN, "question": "1 + 1?", "answer": NAN, "target": 2}]
    found = guess(write_jsonl(tmp_path / "rows.jsonl", [*rows, {**rows[0], "target": NAN}]))
    assert (found.question, found.answer, found.kind) == ("question", "target", "number")


def test_nulls_of_objects_are_dropped_and_those_of_lists_kept():
    given = {"a": None, "b": {"c": None, "d": 0}, "e": [{"f": None}, None, False]}
    assert without_nulls(given) == {"b": {"d": 0}, "e": [{}, None, False]}
