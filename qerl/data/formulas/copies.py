r"""Whether an answer only repeats an expression of the question, which the question asked to evaluate.

"Compute $\sqrt{12}+\sqrt{27}$" is not answered by `\sqrt{12}+\sqrt{27}`, although that equals 5\sqrt{3}. An answer
is a copy if an expression of the question that has the value of the task's answer stands anywhere within it, as it is,
with its parts in another order, or within operations that change nothing: `0+(\sqrt{12}+\sqrt{27})\cdot 1`, or the
square root of its square. A number or a fraction in lowest terms is never a copy.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from qerl.data.formulas.equality import equal_everywhere, points, tree_of, value_at
from qerl.data.formulas.expression import Tree, variables
from qerl.data.formulas.shape import Shape, read
from qerl.data.formulas.spelling import tidy
from qerl.data.formulas.value import close

_OPERATION = re.compile(
    r"(?<=.)[-+*/!]|[\d)]\(|\^(?!\{?\\circ)|\\(?:frac|sqrt|cdot|times|div|binom|log|ln|exp|sin|cos|tan|cot|sec|csc|arc\w+|int|sum"
    r"|prod|lim|lfloor|lceil|pmod|bmod|gcd|det)(?![A-Za-z])|[=<>|]|\\[lg]e(?![A-Za-z])|\\begin"
)
_FRACTION = re.compile(r"-?(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|[^\s(){}\[\]]")
_MIN_TOKENS = 3
_MAX_QUESTION_CHARS = 20_000


def _bare(text: str) -> str:
    """The text without white space and with one spelling of products."""
    text = re.sub(r"(?<![\w}])(\d+)\s?/\s?(\d+)(?!\w)", r"\\frac{\1}{\2}", tidy(text))
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"\\(?:times|ast)(?![A-Za-z])|(?<!\*)\*(?!\*)", r"\\cdot", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    while re.fullmatch(r"\(.*\)", text) and text.count("(") == 1:
        text = text[1:-1]
    return text


def _tokens(text: str) -> Counter[str]:
    """How often each token occurs, brackets aside."""
    return Counter(_TOKEN.findall(text))


def _unevaluated(text: str) -> bool:
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        top, bottom = (int(part) for part in fraction.groups() if part)
        return math.gcd(top, bottom) > 1 or bottom == 1
    return bool(_OPERATION.search(text))


_MAX_PARTS = 200  # of the answer, and of all formulas of the question
_RUNS = (
    re.compile(
        r"(?:\\[A-Za-z]+|\d[\d,.]*|(?<![A-Za-z])(?:[A-Za-z]|sqrt|pi|log|ln|exp|sin|cos|tan|cot|sec|csc)(?![A-Za-z])"
        r"|[-+*/^_(){}!=×÷·−√²³]|[ \t])+"
    ),
    re.compile(r"(?:\d[\d,.]*|[-+*/^()!×÷·−√²³]|[ \t])+"),
)


def is_copied(said: str, gold: str, question: str) -> bool:
    """Whether `said`, which equals the task's answer `gold`, is or contains an expression of `question` as it was."""
    stated, answer = read(said), read(gold)
    if stated.kind != "relation" and not any(_unevaluated(_bare(text)) for text in _values(stated)):
        return False
    golds = [tree for text in _values(answer) if (tree := tree_of(text)) is not None]
    whole = {_form(gold) for gold in golds}
    kept = {form for gold in golds for part in _parts(gold) for form in _forms(part)}
    texts = list(_texts(question[:_MAX_QUESTION_CHARS]))
    formulas = [read(text) for text in texts]
    asked = _asked(formulas, kept)
    for text in _values(stated):
        tree = tree_of(text)
        if tree is None:
            if any(_holds(text, _bare(formula), _bare(answer.text)) for formula in texts):
                return True
        elif _form(tree) not in whole and any(_is_asked(part, golds, kept, asked) for part in _parts(tree)):
            return True
    return stated.kind == answer.kind == "relation" and _has_sides(stated, answer, formulas)


def _texts(question: str) -> Iterator[str]:
    """The formulas of a question, and what looks like one without dollar signs."""
    for match in _FORMULA.finditer(question):
        yield next(group for group in match.groups() if group)
    rest = re.sub(r"(?<=\d)\s*[xX]\s*(?=\d)", "*", _FORMULA.sub(";", question))
    for pattern in _RUNS:
        yield from (run[0] for run in pattern.finditer(rest) if _unevaluated(_bare(run[0])))


def _values(shape: Shape) -> Iterator[str]:
    """The values of a shape; of an equation that gives a name or a result, the last side."""
    if shape.kind == "value":
        yield shape.text
    for item in shape.items[-1:] if shape.kind == "relation" else shape.items:
        yield from _values(item)


def _asked(formulas: list[Shape], kept: set[Tree]) -> list[tuple[Tree, Tree]]:
    """The operations in the formulas, as trees and in one form, without the task's answer."""
    found: dict[Tree, Tree] = {}
    for formula in formulas:
        sides = formula.items if formula.kind == "relation" else (formula,)
        for tree in (tree_of(text) for side in sides for text in _values(side)):
            for part in _parts(tree) if tree is not None else ():
                found.update((form, part) for form in _forms(part) - kept if not _is_plain(form))
                if len(found) > _MAX_PARTS:
                    return [(part, form) for form, part in found.items()]
    return [(part, form) for form, part in found.items()]


def _is_asked(part: Tree, golds: list[Tree], kept: set[Tree], asked: list[tuple[Tree, Tree]]) -> bool:
    for form in (form for form in _forms(part) - kept if not _is_plain(form)):
        for other, asked_form in asked:
            found = part if _covers(asked_form, form) else other if _covers(form, asked_form) else None
            if found is not None and any(equal_everywhere(found, gold, rounded=True) for gold in golds):
                return True
    return False


def _covers(whole: Tree, part: Tree) -> bool:
    """Whether two forms are one, or the terms or factors of `part` are among those of `whole`."""
    if whole == part or whole[0] != part[0] or whole[0] not in ("sum", "product"):
        return whole == part
    return not Counter(part[1:]) - Counter(whole[1:])


def _holds(text: str, formula: str, answer: str) -> bool:
    """Whether a text that is not a tree holds a calculation of the question that the task's answer does not have."""
    is_long = _unevaluated(formula) and _tokens(formula).total() >= _MIN_TOKENS
    return is_long and tree_of(formula) is None and formula in _bare(text) and formula not in answer


def _has_sides(stated: Shape, answer: Shape, formulas: list[Shape]) -> bool:
    """Whether a relation has the sides of one of the question, and the task's answer does not."""
    mine, theirs = _sides(stated), _sides(answer)
    relations = [_sides(formula) for formula in formulas if formula.kind == "relation"]
    return mine is not None and mine != theirs and mine in relations


def _sides(relation: Shape) -> frozenset[Tree] | None:
    trees = [tree_of(side.text) for side in relation.items]
    return None if None in trees else frozenset(_form(_plainest(tree)) for tree in trees)


def _parts(tree: Tree) -> list[Tree]:
    """The expression and all within it, the larger ones first; none of an expression beyond any real one."""
    found = [tree]
    for part in found:
        found.extend(below for below in part[1:] if isinstance(below, tuple))
        if len(found) > _MAX_PARTS:
            return []
    return found


def _forms(tree: Tree) -> set[Tree]:
    return {_form(tree), _form(_plainest(tree))}


def _plainest(tree: Tree) -> Tree:
    """The expression without operations that change no value: a part that has the value of the whole stands for it."""
    names = variables(tree)
    at = list(points(names, positive=True))[: 2 if names else 1]
    values = [value_at(tree, point) for point in at]
    if None not in values:
        for part in _parts(tree)[1:]:
            others = (value_at(part, point) for point in at)
            if all(other is not None and close(value, other) for value, other in zip(values, others, strict=True)):
                return _plainest(part)
    return (tree[0], *(_plainest(part) if isinstance(part, tuple) else part for part in tree[1:]))


def _is_plain(form: Tree) -> bool:
    """Whether there is no operation in a form."""
    return form[0] in ("number", "variable", "constant") or (form[0] == "neg" and _is_plain(form[1]))


_ZERO, _ONE = ("number", Fraction(0)), ("number", Fraction(1))


def _form(tree: Tree) -> Tree:
    """One form for expressions that differ in order, brackets and signs, and without 0 as a term and 1 as a factor."""
    operation, *parts = tree
    parts = [_form(part) if isinstance(part, tuple) else part for part in parts]
    if operation == "neg":
        return _negative(parts[0])
    if operation in ("+", "-"):
        return _sum(parts[0], parts[1] if operation == "+" else _negative(parts[1]))
    if operation in ("*", "/"):
        return _product(parts[0], parts[1] if operation == "*" else _inverse(parts[1]))
    if operation in ("^", "root"):
        exponent = parts[1] if operation == "^" else _inverse(parts[1])
        return parts[0] if exponent == _ONE else ("^", parts[0], exponent)
    return (operation, *parts)


def _negative(form: Tree) -> Tree:
    if form[0] == "number":
        return ("number", -form[1])
    if form[0] == "sum":
        return _sum(*map(_negative, form[1:]))
    return form[1] if form[0] == "neg" else ("neg", form)


def _sum(*terms: Tree) -> Tree:
    flat = [part for term in terms for part in (term[1:] if term[0] == "sum" else (term,)) if part != _ZERO]
    return ("sum", *sorted(flat, key=repr)) if len(flat) > 1 else (*flat, _ZERO)[0]


def _inverse(form: Tree) -> Tree:
    if form[0] == "product":
        return _product(*map(_inverse, form[1:]))
    if form[0] == "neg":
        return _negative(_inverse(form[1]))
    if form[0] == "number" and form[1]:
        return ("number", 1 / form[1])
    return form[1] if form[0] == "inverse" else ("inverse", form)


def _product(*factors: Tree) -> Tree:
    whole = [part for factor in factors for part in (factor[1:] if factor[0] == "product" else (factor,))]
    minus = [factor[0] == "neg" or (factor[0] == "number" and factor[1] < 0) for factor in whole]
    flat = [_negative(factor) if less else factor for factor, less in zip(whole, minus, strict=True)]
    flat = [factor for factor in flat if factor != _ONE]
    numbers = [factor[1] for factor in flat if factor[0] == "number"]
    if len(flat) == len(numbers) == 2 and (numbers[0] * numbers[1]).denominator == max(n.denominator for n in numbers):
        top, bottom = sorted(numbers, key=lambda number: number.denominator)
        if top.denominator == bottom.numerator == 1 and bottom != 1:  # a fraction in lowest terms is a number
            flat = [("number", top * bottom)]
    product = ("product", *sorted(flat, key=repr)) if len(flat) > 1 else (*flat, _ONE)[0]
    return _negative(product) if sum(minus) % 2 else product
