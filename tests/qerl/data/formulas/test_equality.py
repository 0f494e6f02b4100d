"""Comparing formulas: shapes part by part, values at random points; each kind of wrong answer that was accepted."""

import subprocess

import pytest

from qerl.data.grading import math_pool
from qerl.data.grading.grade import compare

# gold -> answers that are right, answers that are wrong
TABLE = {
    # equations are compared as equations; only a bare name or f(x) is dropped
    "x^2+y^2=25": (["x^2 + y^2 = 25", "y^2+x^2=25", "25=x^2+y^2", "2x^2+2y^2=50", "x^2+y^2-25=0"],
                   ["25", "y=25", "x^2+y^2=5", "x^2-y^2=25", "x^2+y^2", "x+y=5", "x^2+y^2<25"]),
    "3x+4y-5=0": (["3x+4y=5", "5=3x+4y", "-3x-4y+5=0", "6x+8y=10", "4y+3x-5=0"],
                  ["0", "3x+4y=-5", "3x-4y=5", "3x+4y=0", "4x+3y=5", "3x+4y>5"]),
    "y=2x+3": (["2x+3", "y = 3 + 2x", "f(x)=2x+3", "2x-y+3=0"], ["3", "x=2y+3", "y=2x-3", "y=3x+2", "2x-3"]),
    "f(x)=x^2-1": (["x^2-1", "f(x)=(x-1)(x+1)", "y=x^2-1"], ["f(x)=x^2+1", "x^2", "-1", "f(x)=1-x^2"]),
    "5": (["x=5", "f(2)=5", "a_n=5", "AB = 5", "\\angle A = 5"], ["x+1=5", "x^2=5", "2x=5", "x=6", "x<5", "xy=5"]),
    # lists with one name
    "x=2,3": (["2,3", "x=3, x=2", "x=3 \\text{ or } x=2", "\\{2,3\\}"],
              ["x=7,8", "x=2", "x=2,4", "2", "y=2,3", "2,3,3", "y=3,x=2", "x=2,y=3", "y=2,x=3"]),
    "x=\\pm 2": (["\\pm 2", "2,-2", "x=-2, x=2"], ["x=2,y=-2", "y=\\pm 2", "x=2"]),
    "x=\\{1,2\\}": (["\\{1,2\\}", "x=2,1", "x=\\{2,1,1\\}"], ["x=1,y=2", "x=\\{1\\}"]),
    "x=2": (["x=\\{2\\}", "\\{2\\}", "2"], ["y=2", "x=\\{2,3\\}"]),
    "x=2, y=3": (["y=3, x=2", "x=2 \\text{ and } y=3"], ["x=3, y=2", "x=2", "x=2, y=4", "x=2,y=3,z=4"]),
    "x \\in [-1,4]": (["[-1,4]", "-1 \\le x \\le 4", "x\\in[-1, 4]", "\\{x | -1\\le x\\le 4\\}"],
                      ["[0,1]", "(-1,4)", "\\{1,2\\}", "[-1,4)", "x \\in [-1,5]", "-1 < x < 4", "\\mathbb{R}"]),
    "(-\\infty,3]": (["-\\infty \\le x \\le 3", "x \\le 3"], ["-\\infty \\le x < 3"]),
    "x > 2": (["(2,\\infty)", "2 < x", "x>2"], ["x \\ge 2", "x<2", "2", "x>3", "[2,\\infty)", "(-\\infty,2)"]),
    # a negative factor turns an inequality round
    "x+y \\le 4": (["4 \\ge x+y", "2x+2y \\le 8", "-x-y \\ge -4", "x \\le 4-y"],
                   ["x+y \\ge 4", "4 \\le x+y", "-x-y \\le -4", "2x+2y \\ge 8", "x+y < 4", "x+y=4", "x+y \\le 5"]),
    "2x-3y > 6": (["6 < 2x-3y", "-2x+3y < -6", "4x-6y > 12"], ["2x-3y < 6", "3y-2x > -6", "2x-3y \\ge 6"]),
    "x<1 \\text{ or } x>3": (["(-\\infty,1)\\cup(3,\\infty)", "x>3 \\text{ or } x<1"], ["1<x<3", "x<1", "(1,3)"]),
    "\\mathbb{R}": (["(-\\infty,\\infty)", "\\mathbb{R}"], ["(0,\\infty)", "\\emptyset", "1"]),
    "x=-\\frac{1}{2} \\text{ or } x=3": (["x=3, -\\frac12", "3, -0.5"], ["w=-\\frac{1}{2} \\text{ or } x=3", "x=3"]),
    "18": (["9+9=18", "= 18", "2\\cdot 9 = 18"], ["9+9=19", "x+9=18", "18=x+9", "18_7", "18_8"]),
    # a base that the gold does not name; digits that the base does not have; thousands
    "2222": (["2222_3", "2222_{3}", "2222_{three}"], ["2222_2", "2221_3"]),
    "1010": (["1010_2", "1_010"], ["1010_1", "1011_2"]),
    "x=a_1": (["a_1", "a_{1}"], ["a_2"]),
    "2222_3": (["2222_{3}", "2222"], ["2222_4"]),
    "1000": (["1,000\\text{ cm}", "f(x)=1,000", "\\text{\\$}1,000", "x = 1,000\\text{ m}", "(1,000)",
              "x=\\left(1,000\\right)", "\\{1,000\\}", "(1,000)\\text{ cm}"],
             ["1,001\\text{ cm}", "(1,000)_2", "(1,001)", "(1, 000)", "[1,000]", "1,0,0,0"]),
    "-2500": (["-(2,500)", "(-2,500)", "-2(1,250)"], ["(2,500)", "-(2,501)"]),
    "\\sqrt{1250}": (["\\sqrt{1,250}", "(1,250)^{1/2}"], ["\\sqrt{(1, 250)}", "\\sqrt{1,251}"]),
    "(1,250)": (["(1, 250)"], ["1250", "1,250", "[1,250]"]),
    "f(1,250)": (["f(1,250)"], ["f(1250)"]),
    "1,000\\text{ cm}": (["1000", "1,000"], ["1", "1,001"]),
    "f(1,000)=3": (["f(1,000)=3", "3"], ["1000"]),
    "(5,100)": (["(5, 100)"], ["(51,00)"]),
    "9005": (["9_005"], ["9_006"]),
    "A2": (["A2_{16}"], ["A3_{16}"]),
    "f(15)=26": (["f(15) = 26", "26"], ["f(16)=26", "f(15)=25"]),
    "s_1=5": (["5", "s_{1}=5"], ["s_2=5"]),
    "1:00\\text{ p.m.}": (["1 \\text{ PM}", "1:00 p.m."], ["1 \\text{ AM}"]),
    # what stands in a set twice is in it once; a list says how often
    "\\{1,2\\}": (["\\{1,2,2\\}", "\\{2,1,1.0,\\frac{4}{2}\\}", "2,1"],
                  ["\\{1,2,3\\}", "1,2,2", "(1,2,2)", "\\{1,1\\}", "\\{1\\}"]),
    "\\{1,2,2\\}": (["\\{1,2\\}", "\\{1,1,2\\}"], ["\\{1,2,3\\}", "\\{1,3,3\\}"]),
    "1,2,2": (["2,1,2"], ["1,2", "\\{1,2\\}", "1,1,2"]),
    # brackets turned outwards are open ends
    "(1,2)": (["]1,2[", "]1;2[", "\\left]1, 2\\right[", "x \\in ]1,2["], ["[1,2]", "]1,2]", "[1,2[", "]1,3[", "]2,1["]),
    "[-1,\\infty)": (["[-1,\\infty[", "[-1,+\\infty["], ["]-1,\\infty[", "[-1,\\infty]"]),
    "]0,\\frac{1}{2}]": (["(0,\\frac12]", "(0,0.5]"], ["(0,\\frac12)", "[0,\\frac12]"]),
    "(-\\infty,1)\\cup[3,4)": (["]-\\infty,1[\\cup[3,4["], ["]-\\infty,1[\\cup]3,4[", "]-\\infty,1]\\cup[3,4["]),
    "\\cos \\pi=-1, \\sin \\pi=0": (["\\sin\\pi=0, \\cos\\pi=-1"], ["\\cos \\pi=-1, \\sin \\pi=1"]),
    # nothing is dropped
    "2 \\text{ hours } 30 \\text{ minutes}": (["2 hours 30 minutes", "2\\text{ hours and }30\\text{ minutes}"],
                                             ["2", "30", "2 hours", "2 hours 20 minutes", "3 hours 30 minutes"]),
    "3i+4j": (["4j+3i"], ["3", "4", "3i", "3i-4j", "4i+3j", "7"]),
    "3\\mathbf{i}+4\\mathbf{j}": (["4\\mathbf{j}+3\\mathbf{i}"], ["3", "3\\mathbf{i}", "3\\mathbf{i}-4\\mathbf{j}"]),
    "6:30": (["6:30", "6:30 \\text{ p.m.}"], ["4:20", "6:31", "6", "1:5", "6.5"]),
    "6:30\\text{ p.m.}": (["6:30 pm", "6:30\\text{ PM}", "6:30"], ["6:30\\text{ a.m.}", "7:30\\text{ p.m.}", "6"]),
    "2^{-60}": (["\\frac{1}{2^{60}}", "4^{-30}"], ["10^{-30}", "2^{-61}", "0", "2^{60}", "0.000000"]),
    "2k": (["k\\cdot 2", "2k"], ["2000", "2", "2m", "2k+1"]),
    "C": (["C", "\\text{C}"], ["D", "B"]),
    "2C+1": (["1+2C"], ["2c+1", "3"]),
    "10^{12}+x": (["x+10^{12}"], ["x+10^{12}+1"]),
    # a name with a number in brackets is the value of a function
    "0": (["\\sqrt2+\\sqrt3-\\sqrt{5+2\\sqrt6}", "\\cos(\\pi/2)"],
          ["e^{-100}", "\\sin(10^{-30})", "f(0)", "N(0)", "f'(0)", "\\sigma(0)", "f_1(0)", "\\text{N}(0)", "f(0)+g(0)",
           "f^{-1}(0)", "P(X=0)", "\\mathbb{P}(X=0)"]),
    "2f": (["f\\cdot 2", "(2)f"], ["f(2)"]),
    "u": (["1u"], ["u(1)"]),
    "3": (["\\log_2 8", "3 rad", "3 (since 1+2=3)"], ["\\sin_2 8"]),
    # units after a value, and after a variable
    "\\frac{\\pi}{3}": (["\\frac{\\pi}{3} rad", "\\frac{\\pi}{3} radians"], ["\\frac{\\pi}{3} million"]),
    "\\pi/3": (["\\pi/3 rad"], ["\\pi rad"]),
    "3\\sqrt{2}": (["3\\sqrt{2} rad"], ["2\\sqrt{3} rad"]),
    "5x": (["5x dollars", "5x degrees", "5x cm", "5x square units", "5x miles per hour"],
           ["5x percent", "5x hundred", "5x squared", "5x plus", "5xy dollars"]),
    "5x dollars": (["5x", "x\\cdot 5"], ["5"]),
    "2\\pi r": (["2\\pi r cm"], ["2\\pi cm"]),
    # words, and products that are none
    "no": (["No", "NO", "\\text{No}"], ["yes", "Yes", "n"]),
    "Yes": (["yes", "\\text{yes}"], ["No"]),
    "all": (["All"], ["al"]),
    "xyzt+1": (["1+txyz"], ["xyz+1"]),
    # values
    "\\frac{x^2-1}{x+2}": (["\\frac{(x-1)(x+1)}{2+x}"],
                              ["\\frac{x^2+1}{x+2}", "\\frac{x-1}{x+2}", "\\frac{x^2-1}{x-2}"]),
    "\\sin^2 x": (["1-\\cos^2 x", "(\\sin x)^2"], ["\\sin x^2", "\\cos^2 x", "\\sin x"]),
    "|x|": (["\\sqrt{x^2}"], ["x", "-x"]),
    "\\ln(x+1)+C": (["C+\\ln(1+x)"], ["\\ln(x-1)+C", "\\ln(x+1)"]),
    "1+\\sqrt{2}, 1-\\sqrt{2}": (["1\\pm\\sqrt{2}", "1-\\sqrt2, 1+\\sqrt2"], ["1+\\sqrt{2}", "1\\pm\\sqrt{3}"]),
    "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}": (
        ["\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
         "\\left[\\begin{array}{cc} 1&2\\\\3&4 \\end{array}\\right]"],
        ["\\begin{bmatrix} 1 & 3 \\\\ 2 & 4 \\end{bmatrix}", "\\begin{bmatrix} 1 & 2 \\end{bmatrix}", "1"]),
    "\\frac{1}{\\sqrt{3}} \\approx 0.577": (["\\frac{\\sqrt3}{3}", "0.577"], ["0.5", "\\frac{1}{3} \\approx 0.577"]),
    # however small or large values are, they are compared and not only their distance
    "1/1500!": (["\\frac{1}{1500!}", "1/(1500\\cdot 1499!)"], ["1/1502!", "0", "1/1500", "\\frac{2}{1500!}"]),
    "1500!": (["1500\\cdot 1499!"], ["1500!+1", "1501!", "2\\cdot 1500!"]),
    "2001!": (["2001\\cdot 2000!"], ["2001!+1", "2002!"]),
    "2^{100000}": (["4^{50000}", "2\\cdot 2^{99999}"], ["2^{100000}-1", "2^{100001}"]),
    "10^{10^{10}}": (["100^{5\\cdot 10^9}"], ["10^{10^{10}}+1"]),
    "10^{20000}": (["100^{10000}"], ["10^{20000}+1"]),
    "e^{-100}": (["1/e^{100}"], ["e^{-101}", "0", "2e^{-100}"]),
    "e^{20000}": (["(e^{100})^{200}"], ["e^{30000}", "e^{20000}+e^{19900}"]),
    "2^{-100000}": (["4^{-50000}"], ["3^{-100000}", "2^{-100001}"]),
    "10^{100000}": (["100^{50000}"], ["10^{100001}", "10^{100000}+1"]),
    "\\pi 10^{-40}": (["\\frac{\\pi}{10^{40}}"], ["2\\pi 10^{-40}"]),
    "\\frac{x}{10^{40}}": (["10^{-40}x"], ["\\frac{2x}{10^{40}}", "0"]),
    "\\binom{3000}{7}": (["\\binom{3000}{2993}", "\\frac{3000!}{7!2993!}"], ["\\binom{3000}{8}", "\\binom{3001}{7}"]),
    "1": (["\\frac{1500!}{1500!}"], ["1+1/1500!", "1+e^{-300}"]),
    "\\sqrt2": (["\\frac{2}{\\sqrt2}"], ["\\sqrt2+10^{-50}"]),
    "36": (["36"], ["3 6"]),
    # a sum or an integral is not evaluated for the model
    "\\frac{1}{3}": (["\\frac{2}{6}"],
                    ["\\int_0^1 x^2 dx", "\\sum_{n=1}^{\\infty} \\frac{1}{4^n}", "\\lim_{x\\to 3} 1/x"]),
    "5050": (["5050"], ["1+2+\\cdots+100", "\\sum_{n=1}^{100} n"]),
}  # fmt: skip
RIGHT = [(gold, answer) for gold, (right, _) in TABLE.items() for answer in [gold, *right]]
WRONG = [(gold, answer) for gold, (_, wrong) in TABLE.items() for answer in wrong]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_right_answers_are_accepted(gold, answer):
    assert compare(answer, gold, "math") == "correct"


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong_answers_are_refused(gold, answer):
    assert compare(answer, gold, "math") in ("wrong", "unparsable")


def test_only_verdicts_on_the_formulas_are_kept(monkeypatch):
    verdicts = iter(["timeout", "equal"])
    monkeypatch.setattr(math_pool, "ask", lambda gold, answer: next(verdicts))
    math_pool.known.clear()
    assert math_pool.compare("p", "q") == "timeout"
    assert math_pool.compare("p", "q") == "equal"
    assert math_pool.compare("p", "q") == "equal", "kept"
    math_pool.known.clear()


def test_a_worker_that_dies_while_it_starts_is_started_anew(monkeypatch):
    begin, programs = subprocess.Popen, ["import sys; sys.exit(1)", None]

    def begin_or_die(command, **options):
        program = programs.pop(0)
        return begin(command if program is None else [command[0], "-c", program], **options)

    math_pool.close()
    math_pool.known.clear()
    monkeypatch.setattr(subprocess, "Popen", begin_or_die)
    assert math_pool.compare("x+y", "y+x") == "equal"
    assert not programs
