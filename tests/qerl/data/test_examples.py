"""Rows of files and of the hub's layouts: each is used, or counted and reported."""

import json
import logging
from decimal import Decimal

import pytest

from qerl.base.errors import ConfigError, DataError
from qerl.data.examples import load_examples
from qerl.data.grading.grade import can_be_graded
from qerl.data.tasks import for_episodes, get_task, with_grader
from tests.helpers.row_files import GSM8K, ROWS, write, write_jsonl, write_parquet


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.parquet"])
def test_each_format_gives_the_same_examples(name, tmp_path):
    examples, report = load_examples("gsm8k", write(tmp_path / name, ROWS))
    assert [(e.question, e.answer, e.id) for e in examples] == [
        (row["question"], row["answer"], str(number)) for number, row in enumerate(ROWS, start=1)
    ]
    assert (report.total, report.kept, report.dropped) == (5, 5, 0)


def test_answers_keep_their_spelling_and_may_be_json_numbers(tmp_path):
    rows = [{"question": "a", "answer": 18}, {"question": "b", "answer": 27.0}, {"question": "c", "answer": "3"}]
    assert [e.answer for e in load_examples("gsm8k", write_jsonl(tmp_path / "a.jsonl", rows))[0]] == ["18", "27.0", "3"]
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"one, two",033\nb,"1,800"\nc,1e3\n', encoding="utf-8")
    assert [e.answer for e in load_examples("aime24", str(path))[0]] == ["033", "1,800", "1e3"]


def test_other_columns_and_ids_are_kept(tmp_path):
    rows = [{"unique": "x1", "problem": "p", "gold": "5", "level": 3}, {"unique": "x1", "problem": "q", "gold": "6"}]
    columns = {"question": "problem", "answer": "gold", "id": "unique"}
    examples, _ = load_examples("gsm8k", write_jsonl(tmp_path / "a.jsonl", rows), columns=columns)
    assert examples[0].extra == {"level": 3}
    assert [e.id for e in examples] == ["x1", "x1@2"], "ids are unique even if the file's are not"


UNUSABLE = [
    ({"answer": "1"}, "no question"),
    ({"question": "q1"}, "no answer"),
    ({"question": "q2", "answer": None}, "no answer"),
    ({"question": " \n", "answer": "1"}, "empty question"),
    ({"question": "q3", "answer": "  "}, "empty answer"),
    ({"question": "q4", "answer": "eighteen"}, "answer that is no number"),
    ({"question": "q5", "answer": "18 or 19"}, "answer that is no number"),
    ({"question": "q6", "answer": "no mark #### "}, "empty answer"),
    ({"question": "q7", "answer": True}, "answer that is no text"),
    ({"question": ["q8"], "answer": "1"}, "question that is no text"),
    ({"question": "What is  0+1?", "answer": "1.0"}, "duplicate"),
    ({"question": "q9", "answer": "2", "dup": True}, "duplicate"),
    ({"question": "q10", "answer": "2", "conflict": True}, "question with two answers"),
    ({"question": "q11", "answer": "2", "eval_exact": ["amc23"]}, "question of an evaluation set"),
    ({"question": "q12", "answer": "2", "eval_near": ["gsm8k"]}, "question of an evaluation set"),
    ({"question": "q13", "answer": "2", "eval_near": "gsm8k"}, "question of an evaluation set"),
    ({"question": "q14", "answer": "2", "eval_near": 1}, "question of an evaluation set"),
    ("no object", "no readable row"),
]


@pytest.mark.parametrize(("row", "reason"), UNUSABLE, ids=[f"{index}-{r}" for index, (_, r) in enumerate(UNUSABLE)])
def test_a_row_that_cannot_be_used_is_counted_and_named(row, reason, tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], row, *ROWS[2:]])
    with caplog.at_level(logging.WARNING):
        examples, report = load_examples("gsm8k", path)
    assert [e.id for e in examples] == ["1", "2", "4", "5", "6"]
    assert report.counts == {reason: 1}
    assert report.total == 6
    assert report.named[0].startswith("row 3: ")
    assert f"{reason} (1); for example row 3: " in caplog.text


def test_a_broken_line_is_named_and_the_others_are_used(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "ans\n\n{"question": "c", "answer": "3"}\n')
    examples, report = load_examples("gsm8k", str(path))
    assert [e.answer for e in examples] == ["1", "3"]
    assert report.named == ("row 2: no readable row",)


def test_a_csv_row_with_too_many_cells_is_broken(tmp_path):
    """A comma in the question would make its second part the answer."""
    path = tmp_path / "a.csv"
    path.write_text('question,answer\nWhat is 1, or so?,1\n"What is 2, or so?",2\nWhat is 3, 3,or so?,3\n')
    examples, report = load_examples("gsm8k", str(path))
    assert [(e.question, e.answer, e.extra) for e in examples] == [("What is 2, or so?", "2", {})]
    assert report.named == ("row 1: no readable row", "row 3: no readable row")


def test_decimal_numbers_of_parquet_files_can_be_answers(tmp_path):
    rows = [{"question": "a", "answer": Decimal("1.50")}, {"question": "b", "answer": Decimal("2.00")}]
    write_parquet(tmp_path / "a.parquet", rows)
    assert [e.answer for e in load_examples("gsm8k", str(tmp_path / "a.parquet"))[0]] == ["1.50", "2.00"]


def test_two_rows_with_one_question_and_different_answers_are_both_dropped(tmp_path):
    rows = [*ROWS, {"question": "What is 0+1?", "answer": "2"}, {"question": "What is 0 + 1?", "answer": "1"}]
    examples, report = load_examples("gsm8k", write_jsonl(tmp_path / "a.jsonl", rows))
    assert [e.id for e in examples] == ["2", "3", "4", "5"]
    assert report.counts == {"question with two answers": 2, "duplicate": 1}
    assert report.named[0] == "row 1: its question stands in row 6 with another answer"


def test_evaluation_keeps_the_rows_that_training_leaves_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "2", "eval_exact": ["amc23"]}])
    assert len(load_examples("gsm8k", path, split="test")[0]) == 1
    with pytest.raises(DataError, match=r"no row can be trained .* question of an evaluation set"):
        load_examples("gsm8k", path, split="train")


def test_a_limit_counts_usable_rows(tmp_path):
    rows = [{"question": "a", "answer": ""}, *ROWS]
    examples, report = load_examples("gsm8k", write_jsonl(tmp_path / "a.jsonl", rows), limit=2)
    assert [e.id for e in examples] == ["2", "3"]
    assert (report.total, report.kept, report.beyond_limit) == (6, 5, 3)
    assert "5 of 6 rows" in str(report)
    assert "the first 2 are used" in str(report)
    with pytest.raises(ConfigError, match="limit is 0"):
        load_examples("gsm8k", str(GSM8K), limit=0)


def test_a_worked_solution_gives_the_answer_that_it_marks(tmp_path):
    """On the hub, the answer column has the worked solution in GSM8K, and a box in copies of AIME."""
    examples, report = load_examples("gsm8k", str(GSM8K), columns={"answer": "solution"})
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert [e.answer.replace(",", "") for e in examples] == [row["answer"] for row in rows]
    assert report.dropped == 0
    rows = [{"problem": "a", "solution": "so $\\boxed{\\frac{1}{2}}$."}, {"problem": "b", "solution": "\\boxed{7"}]
    columns = {"question": "problem", "answer": "solution"}
    examples, report = load_examples("math500", write_jsonl(tmp_path / "a.jsonl", rows), columns=columns)
    assert [e.answer for e in examples] == ["\\frac{1}{2}"]
    assert report.named == ("row 2: empty answer",)


def test_an_answer_has_priority_over_a_worked_solution(tmp_path):
    row = {"prompt": "2+2?", "solution": "We add two and two, and have it.", "answer": "4"}
    assert load_examples("bigmath", write_jsonl(tmp_path / "a.jsonl", [row]))[0][0].answer == "4"


def test_for_a_missing_column_the_present_ones_are_listed_and_how_to_map_them(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"problem": "p", "solution": "5", "n": 1}])
    with pytest.raises(
        DataError, match=r"no column 'question'.*its columns: problem, solution, n.*--columns question="
    ):
        load_examples("gsm8k", path)
    with pytest.raises(DataError, match=r"no column 'answer' for the answer"):
        load_examples("math500", path)
    with pytest.raises(DataError, match=r"no column 'answr'"):
        load_examples("math500", path, columns={"answer": "answr"})
    with pytest.raises(ConfigError, match=r"maps 'anser', which is unknown"):
        load_examples("math500", path, columns={"anser": "solution"})


def test_rows_for_an_environment_may_all_ask_the_same(tmp_path):
    rows = [{"prompt": "Guess.", "answer": "3", "hint": "odd"}, {"prompt": "Guess.", "answer": "4"}] * 2
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    examples, report = load_examples(for_episodes(get_task("own")), path)
    assert [(e.answer, e.extra) for e in examples] == [("3", {"hint": "odd"}), ("4", {})] * 2
    assert (report.dropped, len({e.id for e in examples})) == (0, 4)
    with pytest.raises(DataError, match="no row can be trained"):
        load_examples("own", path)
    once = write_jsonl(tmp_path / "b.jsonl", [{"question": "What is 1+1?", "answer": "2"}] * 2)
    assert load_examples(for_episodes(get_task("gsm8k")), once)[1].dropped == 1


def test_nested_columns_can_be_mapped(tmp_path):
    rows = [
        {"chat": [{"role": "system", "text": "s"}, {"role": "user", "text": f"q{n}"}], "a": {"b.c": n}} for n in (1, 2)
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    columns = {"question": "chat.1.text", "answer": "a"}
    with pytest.raises(DataError, match=r"answer that is no text \(2\)"):
        load_examples("gsm8k", path, columns=columns)
    rows = [{**row, "a.b": "7"} for row in rows]
    path = write_jsonl(tmp_path / "b.jsonl", rows)
    examples, _ = load_examples("gsm8k", path, columns={"question": "chat.1.text", "answer": "a.b"})
    assert [(e.question, e.answer) for e in examples] == [("q1", "7"), ("q2", "7")]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_text_that_no_tokenizer_accepts_and_numbers_that_python_refuses_are_left_out(tmp_path, name):
    good = json.dumps(ROWS[0])
    half = '{"question": "\\ud800 and 2?", "answer": "3"}'
    long = '{"question": "How many?", "answer": ' + "9" * 5000 + "}"
    (tmp_path / name).write_text("\n".join([good, half, long]), encoding="utf-8")
    examples, report = load_examples(get_task("gsm8k"), str(tmp_path / name), "train")
    assert [example.question for example in examples] == [ROWS[0]["question"]]
    assert report.counts == {"question that is no valid text": 1, "no readable row": 1}


READ = (
    "18", "2\\sqrt{3}", "x^2+y^2=25", "(1,2)", "[0,1)\\cup(2,\\infty)", "\\text{Evelyn}", "C", "x=2,3", "1011_2",
    "\\int_0^1 x^2 dx", "\\sum_{n=1}^{5} n", "6:30\\text{ p.m.}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\emptyset",
    "10\\text{ cm}^2", "50\\%", "\\frac{270}7\\text{ degrees}", "\\mathbb{R}", "y=c_1 e^{2t}+c_2 e^{-t}", "3m",
)  # fmt: skip
UNREAD = (
    "\\frac{\\text{", "This is not a subspace because it is not closed",
    "$f(y)=\\sin y / 4$ for $0<y<\\pi^{2}$ and 0 otherwise",
    "concave up on $(0, \\infty)$", "1+x-x^2+\\cdots", "\\sqrt{", "Answers will vary, but one of them is $x+1$.", "$",
)  # fmt: skip


@pytest.mark.parametrize("answer", READ)
def test_mathematics_can_be_graded(answer):
    assert can_be_graded(answer, "math")


@pytest.mark.parametrize("answer", UNREAD)
def test_prose_and_broken_latex_cannot_be_graded(answer):
    assert not can_be_graded(answer, "math")


def test_rows_with_such_answers_are_counted_and_named_or_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"q{number}", "answer": answer} for number, answer in enumerate((*READ[:3], *UNREAD[:3]))]
    path.write_text("".join(json.dumps({"problem": row["question"], **row}) + "\n" for row in rows))
    task = get_task("math500")
    columns = {"question": "question", "answer": "answer"}
    kept, report = load_examples(task, str(path), "test", columns)
    assert [example.answer for example in kept] == list(READ[:3])
    assert report.counts == {"answer that cannot be read": 3}
    assert "row 4: the answer '\\\\frac{\\\\text{' cannot be read" in str(report)
    assert "training takes it with data.task: own and a data.grader, `qerl eval` with --keep-unreadable" in str(report)
    own = load_examples(with_grader(get_task("own"), "grader.py:grade"), str(path), "train", columns)[1]
    assert own.counts == {}
    kept, report = load_examples(task, str(path), "test", columns, keep_unreadable=True)
    assert (len(kept), report.counts) == (6, {})
