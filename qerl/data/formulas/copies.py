r"""Whether an answer only repeats an expression of the question, which the question asked to evaluate.

"Compute $\sqrt{12}+\sqrt{27}$" is not answered by `\sqrt{12}+\sqrt{27}`, although that equals 5\sqrt{3}. An answer
is a copy if an expression of the question that has the value of the task's answer stands anywhere within it, as it is,
with its parts in another order, or within operations that change nothing: `0+(\sqrt{12}+\sqrt{27})\cdot 1`, or the
square root of its square. A number or a fraction in lowest terms is never a copy.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from qerl.data.formulas.equality import equal_everywhere, points, tree_of, value_at
from qerl.data.formulas.expression import Tree, variables
from qerl.data.formulas.shape import Shape, read
from qerl.data.formulas.spelling import tidy
from qerl.data.formulas.value import close

Form = frozenset[tuple[Any, int]]
_OPERATION = re.compile(r"[-+*/=<>]|\\(?:frac|sqrt|cdot|times|int|sum|prod|lim|det|gcd|begin|[lg]e)(?![A-Za-z])")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MAX_QUESTION_CHARS = 20_000


def _bare(text: str) -> str:
    """The text in one spelling, without white space."""
    return re.sub(r"\s+", "", tidy(text))


def _unevaluated(text: str) -> bool:
    """Whether there is something to calculate in a text."""
    tree = tree_of(text)
    return bool(_OPERATION.search(text)) if tree is None else not _is_plain(_form(tree))


_MAX_PARTS = 200  # of the answer, and of all formulas of the question
_RUN = re.compile(
    r"(?:\\[A-Za-z]+|\d[\d,.]*|(?<![A-Za-z])(?:[A-Za-z]|sqrt|pi|log|ln|exp|sin|cos|tan|cot|sec|csc)(?![A-Za-z])"
    r"|[-+*/^_(){}!=×÷·−√²³]|[ \t])+"
)


def is_copied(said: str, gold: str, question: str) -> bool:
    """Whether `said`, which equals the task's answer `gold`, is or contains an expression of `question` as it was."""
    stated, answer = read(said), read(gold)
    if stated.kind != "relation" and not any(map(_unevaluated, _values(stated))):
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
    yield from (run[0] for run in _RUN.finditer(rest) if _unevaluated(tidy(run[0])))


def _values(shape: Shape) -> Iterator[str]:
    """The values of a shape; of an equation that gives a name or a result, the last side."""
    if shape.kind == "value":
        yield shape.text
    for item in shape.items[-1:] if shape.kind == "relation" else shape.items:
        yield from _values(item)


def _asked(formulas: list[Shape], kept: set[Form]) -> list[tuple[Form, Tree]]:
    """The operations in the formulas, as trees and in one form, without the task's answer."""
    found: dict[Form, Tree] = {}
    for formula in formulas:
        sides = formula.items if formula.kind == "relation" else (formula,)
        for tree in (tree_of(text) for side in sides for text in _values(side)):
            for part in _parts(tree) if tree is not None else ():
                found.update((form, part) for form in _forms(part) - kept if not _is_plain(form))
                if len(found) > _MAX_PARTS:
                    return list(found.items())
    return list(found.items())


def _is_asked(part: Tree, golds: list[Tree], kept: set[Form], asked: list[tuple[Form, Tree]]) -> bool:
    for form in (form for form in _forms(part) - kept if not _is_plain(form)):
        for asked_form, other in asked:
            found = part if _covers(asked_form, form) else other if _covers(form, asked_form) else None
            if found is not None and any(equal_everywhere(found, gold, rounded=True) for gold in golds):
                return True
    return False


def _covers(whole: Form, part: Form) -> bool:
    """Whether all that `part` is made of is in `whole`."""
    return not Counter(dict(part)) - Counter(dict(whole))


def _holds(text: str, formula: str, answer: str) -> bool:
    """Whether a text that is not a tree holds a calculation of the question that the task's answer does not have."""
    return _unevaluated(formula) and tree_of(formula) is None and formula in _bare(text) and formula not in answer


def _has_sides(stated: Shape, answer: Shape, formulas: list[Shape]) -> bool:
    """Whether a relation has the sides of one of the question, and the task's answer does not."""
    mine, theirs = _sides(stated), _sides(answer)
    relations = [_sides(formula) for formula in formulas if formula.kind == "relation"]
    return mine is not None and mine != theirs and mine in relations


def _sides(relation: Shape) -> frozenset[Form] | None:
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


def _forms(tree: Tree) -> set[Form]:
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


def _is_plain(form: Form) -> bool:
    """Whether there is no operation in a form."""
    return sum(count for _, count in form) < 2


def _form(tree: Tree) -> Form:
    """What an expression is made of, whatever its order, brackets and signs: how often each number, name and operation
    is in it. A fraction in lowest terms is a number, and a root a power."""
    return frozenset(_counted(tree).items())


def _counted(tree: Tree) -> Counter[Any]:
    operation, *parts = tree
    if operation in ("number", "variable", "constant"):
        return Counter([abs(parts[0]) if operation == "number" else parts[0]])
    if operation == "neg":
        return _counted(parts[0])
    if operation == "/" and parts[0][0] == parts[1][0] == "number" and parts[1][1]:
        fraction = parts[0][1] / parts[1][1]
        if fraction.denominator == parts[1][1]:
            return Counter([abs(fraction)])
    if operation == "root" and parts[1][0] == "number" and parts[1][1]:
        parts[1] = ("number", 1 / parts[1][1])
    kind = {"-": "+", "/": "*", "root": "^", "call": parts[0]}.get(operation, operation)
    return sum((_counted(part) for part in parts if isinstance(part, tuple)), Counter([kind]))
