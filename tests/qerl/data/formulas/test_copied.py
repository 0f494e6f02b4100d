"""Copying the question's expression into the box is not an answer."""

import pytest

from qerl.data.tasks import get_task, grade, grade_many

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
    ("Evaluate $\\binom{10}{3}$.", "120", ["\\binom{10}{3}"], ["120"]),
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
