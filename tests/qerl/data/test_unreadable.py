"""Answers that no grader can read are named when data load, instead of being graded as wrong for ever."""

import json

import pytest

from qerl.data.examples import load_examples
from qerl.data.grading.grade import can_be_graded
from qerl.data.tasks import get_task

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
    kept, report = load_examples(task, str(path), "test", columns, keep_unreadable=True)
    assert (len(kept), report.counts) == (6, {})
