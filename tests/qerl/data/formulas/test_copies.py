"""Copying the question's expression into the box is not an answer."""

import pytest

from qerl.data.grading.grade import grade, grade_many
from qerl.data.tasks import get_task

MATH, NUMBER = get_task("math500"), get_task("gsm8k")
# question, gold, answers that copy, answers that are right
CASES = [
    ("Compute $\\sqrt{12}+\\sqrt{27}$.", "5\\sqrt{3}", ["\\sqrt{12}+\\sqrt{27}", "\\sqrt{27}+\\sqrt{12}"],
     ["\\sqrt{75}"]),
    ("What is $2^{10}$?", "1024", ["2^{10}", "2^10", "(2^{10})"], ["1024", "1{,}024", "4^5"]),
    ("Simplify $\\frac{36}{48}$.", "\\frac{3}{4}", ["\\frac{36}{48}", "\\dfrac{36}{48}", "36/48"], ["3/4", "0.75"]),
    ("Find $\\sin 30^\\circ + \\cos 60^\\circ$.", "1", ["\\sin 30^\\circ + \\cos 60^\\circ"],
     ["1", "\\frac12+\\frac12"]),
    ("Expand $(x+1)(x-1)$.", "x^2-1", ["(x+1)(x-1)", "(x-1)(x+1)"], ["-1+x^2", "x^2-1"]),
    ("Evaluate $\\binom{10}{3}$.", "120", ["\\binom{10}{3}", "\\dbinom{10}{3}", "\\tbinom{10}{3}"], ["120"]),
    ("Compute $7\\cdot 8$", "56", ["7\u22178", "7\u22c58", "7\u22198", "7\u27158", "7\u00d78"], ["56"]),
    ("Evaluate $\\log_2 8 + 5!$", "123", ["\\log_2 8 + 5!", "5! + \\log_2 8"], ["123", "3+120"]),
    ("Evaluate $\\int_0^1 x^2\\,dx$.", "\\frac13", ["\\int_0^1 x^2 dx"], ["1/3"]),
    ("Solve $x^2-5x+6=0$.", "2,3", ["x^2-5x+6=0"], ["x=2,3", "3,2"]),
    ("Solve $|x-1|<3$.", "(-2,4)", ["|x-1|<3"], ["-2<x<4"]),
    ("Let $f(x)=3x+2$. Find $f(4)$.", "14", ["f(4)"], ["14", "f(4)=14", "3(4)+2"]),
    ("Is $\\frac{1}{2}$ or $0.6$ the chance?", "0.5", [], ["\\frac{1}{2}", "1/2"]),
    ("Which is larger, $\\sqrt{10}$ or $3$?", "\\sqrt{10}", [], ["\\sqrt{10}"]),
    ("Write $y-2x=3$ with $y$ alone.", "y=2x+3", ["y-2x=3"], ["y=3+2x", "2x+3"]),
]  # fmt: skip


@pytest.mark.parametrize(("question", "gold", "copies", "right"), CASES, ids=[case[0] for case in CASES])
def test_a_copy_is_no_answer(question, gold, copies, right):
    assert [grade(MATH, f"\\boxed{{{text}}}", gold, question).reason for text in copies] == ["wrong"] * len(copies)
    assert [grade(MATH, f"\\boxed{{{text}}}", gold, question).reason for text in right] == ["correct"] * len(right)


def test_numbers_of_a_question_are_answers():
    question = "A baker has 36/2 trays, 18 in all. How many is 0.5 of 36?"
    assert grade(NUMBER, "\\boxed{18}", "18", question).correct
    assert grade(NUMBER, "\\boxed{36/2}", "18", question).reason == "wrong"
    assert grade(NUMBER, "\\boxed{36/2}", "18").correct, "without the question nothing is a copy"
    answers = ["\\boxed{18}", "\\boxed{36/2}"]
    assert [g.correct for g in grade_many(NUMBER, answers, ["18"] * 2, [question] * 2)] == [True, False]


# Operations that change nothing, around a copy and within it.
WRAPS = (
    "{e}+0", "0+{e}", "{e}-0", "{e}+5-5", "5+{e}-5", "0\\cdot 7+{e}", "{e}+\\ln 1", "1\\cdot({e})", "({e})*1", "1({e})",
    "({e})/1", "\\frac{{{e}}}{{1}}", "2\\cdot\\frac{{{e}}}{{2}}", "\\frac{{-({e})}}{{-1}}", "(-1)(-1)({e})", "--({e})",
    "-(-({e}))", "+({e})", "({e})^1", "({e})^{{2/2}}", "({e})\\cdot 2^0", "\\sqrt{{({e})^2}}", "e^{{\\ln({e})}}",
    "\\frac{{1}}{{\\frac{{1}}{{{e}}}}}", "\\frac{{({e})^2}}{{{e}}}", "x={e}+0", "{e}+0={e}", "\\text{{Answer: }}{e}+0",
)  # fmt: skip
WRAPPED = [
    ("Compute $3+4$.", "7", "3+4"),
    ("Compute 3+4", "7", "4+3"),
    ("What is 17 * 23?", "391", "17 \\cdot 23"),
    ("What is $3 + 4 - 3$?", "4", "3+4-3"),
    ("Evaluate $6!$", "720", "6!"),
    ("What is 17 \u00d7 23?", "391", "17*23"),
    ("What is 17 x 23?", "391", "17 \\times 23"),
    ("What is $17(23)$?", "391", "17(23)"),
    ("Compute $\\sqrt{49}$.", "7", "49^{1/2}"),
    ("Compute $1-2+5$", "4", "1-2+5"),
    ("Rationalize $\\frac{1}{\\sqrt2-1}$", "\\sqrt2+1", "\\frac{1}{\\sqrt2-1}"),
    *((question, gold, copies[0]) for question, gold, copies, _ in CASES[:6] if copies),
]


@pytest.mark.parametrize(("question", "gold", "copy"), WRAPPED, ids=[case[2] for case in WRAPPED])
def test_a_copy_within_operations_that_change_nothing_is_no_answer(question, gold, copy):
    answers = [form.format(e=copy) for form in ("{e}", *WRAPS)]
    grades = [grade(MATH, f"\\boxed{{{text}}}", gold, question) for text in answers]
    assert [g.extracted for g in grades if g.correct] == []


# question, answer that is stated, the task's answer, whether it earns
MORE = [
    ("Compute $3+4$.", "3+4=7", "7", True),
    ("Compute $3+4$.", "\\frac{3}{1}+4\\cdot 1", "7", False),
    ("Compute $3+4$.", "\\frac{14}{2}", "7", True),
    ("Let $f(x)=x+1$. What is $f(2)$?", "f(2)=3", "3", True),
    ("Compute $2^3$", "2\\cdot 2\\cdot 2", "8", True),
    ("Let $a=3+4$. What is $2a$?", "2(3+4)", "14", True),
    ("Let $a=\\sqrt{12}$. Find $a+\\sqrt{27}$", "\\sqrt{12}+\\sqrt{27}", "5\\sqrt3", True),
    ("Which is larger, $\\sqrt{10}$ or 3?", "\\sqrt{10}+0", "\\sqrt{10}", True),
    ("Divide $x^3+2x+1$ by $x^3$. What remains?", "1+2x", "2x+1", True),
    ("Give $(3+4, 5\\cdot 2)$ as numbers.", "(3+4+0, 10)", "(7,10)", False),
    ("Give $(3+4, 5\\cdot 2)$ as numbers.", "(7, 10)", "(7,10)", True),
    ("One root is $1+\\sqrt2$. Find all.", "1-\\sqrt2, 1+\\sqrt2", "1+\\sqrt2,1-\\sqrt2", True),
    ("Write $y-2x=3$ with $y$ alone.", "1\\cdot(y-2x)=3", "y=2x+3", False),
    ("Write $y-2x=3$ with $y$ alone.", "3=y-2x+0", "y=2x+3", False),
    ("Write $y-2x=3$ with $y$ alone.", "3+2x=y", "y=2x+3", True),
    ("Evaluate $\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}$", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}+0", "-2", False),
]


@pytest.mark.parametrize(("question", "stated", "gold", "earns"), MORE, ids=[case[1] for case in MORE])
def test_what_contains_the_question_earns_if_it_is_evaluated(question, stated, gold, earns):
    assert grade(MATH, f"\\boxed{{{stated}}}", gold, question).correct is earns
