"""Whether two answers are equal as mathematics: their shapes part by part, their values at random points.

Values are exact numbers, or formulas that are evaluated at random points. Relations are compared and never solved: two
equations are equal if their differences of sides are proportional, and an inequality with a variable alone on its side
is an interval. What qerl/data/formulas/expression.py does not understand (integrals, sets of other kinds) goes to
`fallback`, which is math-verify in its own process.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from qerl.data.formulas.expression import ExpressionError, Tree, parse_expression, variables
from qerl.data.formulas.number import OF_VALUE, is_boxed_unit, is_unit, parse_number
from qerl.data.formulas.shape import Shape, is_assignment, is_name, is_single, read, read_single
from qerl.data.formulas.spelling import TEXT_BOX
from qerl.data.formulas.value import Value, as_real, close, close_rounded, equal_constants, evaluate, ratio

Verdict = Literal["equal", "different", "unparsable", "bad_answer", "timeout"]
Fallback = Callable[[str, str], Verdict]  # gold, answer

_POSITIVE_POINTS, _MIXED_POINTS = 3, 3
_INFINITY = re.compile(r"\+?\s*\\infty|\+?\s*inf(?:inity)?|\+?\s*oo")


class UndecidedError(Exception):
    """A comparison needs math-verify, which gave another verdict than equal or different."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict


def value_at(tree: Tree, point: dict[str, Fraction]) -> Value | None:
    try:
        return evaluate(tree, point)
    except ExpressionError:
        return None


def points(names: frozenset[str], positive: bool) -> Iterator[dict[str, Fraction]]:
    """The same random points for the same names, so that a verdict never changes."""
    rng = random.Random(",".join(sorted(names)) + str(positive))
    for number in range(_POSITIVE_POINTS if positive else _MIXED_POINTS):
        size = (1, 4, 12)[number % 3]
        signs = (1,) if positive else (-1, 1)
        yield {name: rng.choice(signs) * Fraction(rng.randrange(101, 997) * size, 1009) for name in sorted(names)}


_TAIL = re.compile(
    r"\s*(?:\\(?:text|textrm|mathrm|mbox|rm)\s*\{([^{}]*)\}\s*(?:\^\s*\{?-?[1-4]\}?)?"
    r"|(?<=[\d)}\s])[A-Za-z][A-Za-z. ]+(?:\^\{?[1-4]\}?)?)$"
)


def _without_unit(text: str, words: bool) -> str:
    """The value without a unit after it, in a text box or in `words`. A degree sign belongs to an angle."""
    tail = _TAIL.search(text, 1)
    while tail:
        boxed, changing = tail[1] is not None, OF_VALUE & set(tail[0].lower().split())  # "\pi million"
        if is_boxed_unit(tail[1]) if boxed else words and not changing and is_unit(tail[0], algebra=True):
            return text[: tail.start()].strip()
        tail = _TAIL.search(text, tail.start() + 1)  # "x dollars" is no unit, and "dollars" is one
    return text


def tree_of(text: str, words: bool = True) -> Tree | None:
    """The expression that a text without its unit is; None if it is not understood, or has `words` that it may not."""
    try:
        return parse_expression(_without_unit(text, words))
    except (ExpressionError, RecursionError):
        return None


def endless(text: str) -> int:
    """1 for infinity, -1 for minus infinity, 0 for anything else."""
    bare = text.strip("(){} ")
    if bare.startswith("-"):
        return -1 if _INFINITY.fullmatch(bare[1:].strip()) else 0
    return 1 if _INFINITY.fullmatch(bare) else 0


_BLANK = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # a space between two digits makes them two numbers
DECIMAL = re.compile(r"\d\.\d")


def equal_values(gold: str, answer: str, fallback: Fallback) -> bool:
    """Whether two values are equal, as fractions, at random points, or by math-verify. Raises UndecidedError."""
    if re.sub(_BLANK, "", gold) == re.sub(_BLANK, "", answer):
        return True
    if endless(gold) or endless(answer):
        return endless(gold) == endless(answer)
    if "\\emptyset" in (gold, answer):
        return False
    numbers = parse_number(gold, algebra=True), parse_number(answer, algebra=True)
    if None not in numbers and (numbers[0].equals(numbers[1]) or all(number.terminates() for number in numbers)):
        return numbers[0].equals(numbers[1])
    trees = [
        ("number", number.value) if number and not number.percent else tree_of(text)
        for number, text in zip(numbers, (gold, answer), strict=True)
    ]
    if None in trees:
        return _ask(gold, answer, fallback)
    equal = equal_everywhere(*trees, rounded=any(map(DECIMAL.search, (gold, answer))))
    return _ask(gold, answer, fallback) if equal is None else equal


# What a formula for math-verify may not hold: prose and dots, of which it would drop a part without a word.
_DROPPED = re.compile(r"\\(?:[cl]?dots|approx|text|mbox|mathrm|prime|quad)(?![A-Za-z])|\.\.|[?#&@`\"]|\\\\")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{4,}")
_OPERATORS = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|det|gcd|max|min|bigcup|bigcap)(?![A-Za-z])")


def _ask(gold: str, answer: str, fallback: Fallback) -> bool:
    """math-verify's verdict on two values. It would evaluate a sum or an integral that the answer should have done."""
    if is_prose(gold):
        raise UndecidedError("bad_answer")
    if is_prose(answer):
        raise UndecidedError("unparsable")
    if set(_OPERATORS.findall(answer)) - set(_OPERATORS.findall(gold)):
        return False
    verdict = fallback(gold, answer)
    if verdict not in ("equal", "different"):
        raise UndecidedError(verdict)
    return verdict == "equal"


def is_prose(text: str) -> bool:
    """Whether a value has words, dots or rounding in it, of which math-verify would drop a part."""
    return bool(_DROPPED.search(re.sub(r"\\begin\{.*\\end\{\w+\}", "", text)) or _PROSE.search(text))


def equal_everywhere(one: Tree, other: Tree, rounded: bool = False) -> bool | None:
    """Whether two expressions have the same value at random points; None if they have no value at enough of them.

    Two without variables that are understood but have no value, or one that is too large, differ unless they are one.

    At points with negative values only real values count, as roots and logarithms have several branches there. With
    `rounded`, values without variables need to agree to six decimal places only.
    """
    names = variables(one) | variables(other)
    if not names:
        if (equal := equal_constants(one, other)) is None:
            return one == other
        if equal or not rounded:
            return equal
        values = value_at(one, {}), value_at(other, {})
        return None not in values and close_rounded(*values)
    compared = 0
    for positive in (True, False):
        for point in points(names, positive):
            values = value_at(one, point), value_at(other, point)
            if None in values:
                continue
            real = as_real(values[0]), as_real(values[1])
            if not positive and None in real:
                continue
            compared += 1
            if not close(*values):
                return False
    return True if compared >= 2 else None


_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}
_REALS = Shape("ordered", "()", (Shape("value", "-\\infty"), Shape("value", "\\infty")))


def compare_math(answer: str, gold: str, fallback: Fallback) -> Verdict:
    """The verdict on an answer. Raises nothing; takes milliseconds, apart from what `fallback` takes."""
    theirs, mine = read(gold), read(answer)
    if is_single(theirs):
        theirs, mine = read_single(gold), read_single(answer)
    try:
        return "equal" if _equal(_canonical(theirs), _canonical(mine), fallback) else "different"
    except UndecidedError as error:
        return error.verdict


_MAX_WORDS = 6


def unread_values(gold: str) -> list[str]:
    """The values within an answer that are understood only by math-verify, if at all; and long texts in words."""
    return list(_unread(_canonical(read(gold))))


def _unread(shape: Shape) -> Iterator[str]:
    if shape.kind == "value":
        if tree_of(shape.text, words=False) is None and not endless(shape.text) and shape.text != "\\emptyset":
            yield shape.text
    elif shape.kind == "words" and len(shape.text.split()) > _MAX_WORDS:
        yield shape.text
    for item in shape.items:
        yield from _unread(item)


def _canonical(shape: Shape) -> Shape:
    """The shape with simple inequalities as intervals, alternatives of intervals as unions, and \\mathbb{R} as one.

    In "x = 1, 2" and "x = \\pm 2" each value has the name.
    """
    if shape.kind == "value" and shape.text.strip("{}") in ("\\mathbb{R", "\\mathbb{R}"):
        return _REALS
    items = tuple(_canonical(item) for item in shape.items)
    if shape.kind == "relation":
        if is_assignment(shape) and items[-1].kind in ("list", "set") and len(items[-1].items) > 1:
            return Shape(items[-1].kind, items=tuple(_named(items[0], item) for item in items[-1].items))
        return _interval(Shape("relation", shape.text, items)) or Shape("relation", shape.text, items)
    names = {item.items[0] for item in items if is_assignment(item) and is_name(item.items[0].text)}
    if shape.kind == "list" and len(names) == 1:
        return Shape("list", items=tuple(_named(*names, item) for item in items))
    if shape.kind == "list" and all(
        item.kind == "ordered" and one.kind == "relation" for item, one in zip(items, shape.items, strict=True)
    ):
        return Shape("union", items=items)
    return Shape(shape.kind, shape.text, items)


def _named(name: Shape, item: Shape) -> Shape:
    return Shape("relation", "=", (name, item)) if item.kind == "value" else item


def _interval(relation: Shape) -> Shape | None:
    """The interval that "x > 2" or "1 \\le x < 2" describes; None for any other relation."""
    signs, sides = relation.text.split(), relation.items
    if signs[0] in (">", "\\ge"):
        signs, sides = [_FLIPPED.get(sign, sign) for sign in reversed(signs)], tuple(reversed(sides))
    if not set(signs) <= {"<", "\\le"}:
        return None
    if len(sides) == 3 and is_name(sides[1].text) and _constant(sides[0]) and _constant(sides[2]):
        low, high = sides[0], sides[2]
    elif len(sides) == 2 and is_name(sides[0].text) and _constant(sides[1]):
        low, high, signs = _REALS.items[0], sides[1], ["<", *signs]
    elif len(sides) == 2 and is_name(sides[1].text) and _constant(sides[0]):
        low, high, signs = sides[0], _REALS.items[1], [*signs, "<"]
    else:
        return None
    signs = ["<" if endless(end.text) else sign for end, sign in zip((low, high), signs, strict=True)]
    return Shape("ordered", ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]"), (low, high))


def _constant(shape: Shape) -> bool:
    tree = tree_of(shape.text)
    return bool(endless(shape.text)) or (tree is not None and not variables(tree))


def _equal(gold: Shape, answer: Shape, fallback: Fallback) -> bool:
    """Whether two shapes are equal; the gold decides what an answer without a name or brackets stands for."""
    if "\\approx" in (gold.text, answer.text) and gold.text != answer.text:
        return _equal_rounded(gold, answer, fallback)
    gold, answer = _unnamed(gold, answer), _unnamed(answer, gold)
    if gold.kind == "relation" or answer.kind == "relation":
        return gold.kind == answer.kind and _equal_relations(gold, answer, fallback)
    gold, answer = _single(gold, answer), _single(answer, gold)
    kinds = {gold.kind, answer.kind}
    if kinds <= {"list", "set"} or kinds == {"union"}:
        if "set" in kinds:  # what is in it twice is in it once
            gold, answer = (replace(each, items=_distinct(each)) for each in (gold, answer))
        return _equal_unordered(gold.items, answer.items, fallback)
    if kinds == {"list", "ordered"}:
        return "()" in (gold.text, answer.text) and _equal_in_order(gold, answer, fallback)
    if kinds in ({"ordered"}, {"parts"}):
        return _equal_rows(gold, answer, fallback)
    if "words" in kinds and kinds <= {"words", "value"}:
        return _letters(gold) == _letters(answer)
    if kinds == {"value"}:
        return equal_values(gold.text, answer.text, fallback)
    return kinds == {"parts", "value"} and _equal_mixed_parts(gold, answer, fallback)


def _equal_rounded(gold: Shape, answer: Shape, fallback: Fallback) -> bool:
    """One of two answers is "exact \\approx rounded". Either side of the gold counts, but only one of the answer's."""
    if gold.text == "\\approx":
        return any(_equal(side, answer, fallback) for side in gold.items)
    exact = gold.kind != "value" or not DECIMAL.search(gold.text)
    return _equal(gold, answer.items[0 if exact and not is_name(answer.items[0].text) else -1], fallback)


def _unnamed(shape: Shape, other: Shape) -> Shape:
    """The value of "x = 5" where the other answer is not a relation; the shape itself elsewhere."""
    return shape.items[-1] if is_assignment(shape) and other.kind != "relation" else shape


def _single(shape: Shape, other: Shape) -> Shape:
    """The only member of a set or list where the other answer is a value."""
    alone = shape.kind in ("set", "list") and len(shape.items) == 1 and other.kind not in ("set", "list")
    return shape.items[0] if alone else shape


def _letters(shape: Shape) -> str:
    text = TEXT_BOX.sub(r"\1", shape.text) if shape.kind == "value" else shape.text
    return re.sub(r"[\s(){}]", "", text).casefold()


def _equal_in_order(gold: Shape, answer: Shape, fallback: Fallback) -> bool:
    return len(gold.items) == len(answer.items) and all(
        _equal(one, other, fallback) for one, other in zip(gold.items, answer.items, strict=True)
    )


def _equal_rows(gold: Shape, answer: Shape, fallback: Fallback) -> bool:
    """Tuples, intervals, matrices and quantities: same brackets, same units, equal parts. A column is not a tuple."""
    if gold.kind == answer.kind == "parts" and gold.text.split()[0] == answer.text.split()[0] == "clock":
        halves = {*gold.text.split()[1:]}, {*answer.text.split()[1:]}
        return (halves[0] == halves[1] or not all(halves)) and _equal_in_order(gold, answer, fallback)
    return gold.kind == answer.kind and gold.text == answer.text and _equal_in_order(gold, answer, fallback)


def _equal_mixed_parts(gold: Shape, answer: Shape, fallback: Fallback) -> bool:
    """A ratio of two may be written as a fraction."""
    ratio, value = (gold, answer) if gold.kind == "parts" else (answer, gold)
    if ratio.text != "ratio" or len(ratio.items) != 2 or any(item.kind != "value" for item in ratio.items):
        return False
    return equal_values(f"\\frac{{{ratio.items[0].text}}}{{{ratio.items[1].text}}}", value.text, fallback)


def _equal_unordered(golds: Sequence[Shape], answers: Sequence[Shape], fallback: Fallback) -> bool:
    """Whether each part of the one has an equal part of its own in the other."""
    if len(golds) != len(answers):
        return False
    rest = list(answers)
    for gold in golds:
        index = next((i for i, answer in enumerate(rest) if _equal(gold, answer, fallback)), None)
        if index is None:
            return False
        del rest[index]
    return True


def _distinct(shape: Shape) -> tuple[Shape, ...]:
    """The members of a set, each once, as far as is known without math-verify; those of a bare list as they are."""
    found: list[Shape] = []
    for item in shape.items:
        if shape.kind != "set" or not any(_are_one(other, item) for other in found):
            found.append(item)
    return tuple(found)


def _are_one(one: Shape, other: Shape) -> bool:
    try:
        return _equal(one, other, lambda *_: "different")
    except UndecidedError:
        return False


def _equal_relations(gold: Shape, answer: Shape, fallback: Fallback) -> bool:
    """Relations with the same signs whose differences of sides are proportional, and assignments to one name."""
    signs = gold.text.split(), answer.text.split()
    sides = gold.items, answer.items
    if is_assignment(gold) and is_assignment(answer):
        names = [re.sub(r"\s", "", side[0].text) for side in sides]
        functions = all("(" in name or name == "y" for name in names)
        if names[0] == names[1] or (functions and "y" in names):
            return _equal(gold.items[-1], answer.items[-1], fallback)
    flipped = [_FLIPPED.get(sign, sign) for sign in reversed(signs[1])]
    for their_signs, their_sides in ((signs[1], sides[1]), (flipped, tuple(reversed(sides[1])))):
        if signs[0] == their_signs and len(sides[0]) == len(their_sides):
            mine = Shape("ordered", "", sides[0]), Shape("ordered", "", their_sides)
            both = *sides[0], *their_sides
            if len(both) == 4 and signs[0] != ["\\approx"] and all(side.kind == "value" for side in both):
                if _proportional(sides[0], their_sides, equation=signs[0] in (["="], ["\\ne"])):
                    return True
                if all(tree_of(side.text) is not None for side in both):
                    continue
            if _equal_in_order(*mine, fallback):
                return True
    return False


def _proportional(gold: Sequence[Shape], answer: Sequence[Shape], equation: bool) -> bool:
    """Whether gold's left minus right side is a constant times answer's (of an inequality, a positive one)."""
    trees = [tree_of(side.text) for side in (*gold, *answer)]
    if None in trees:
        return False
    differences: list[Tree] = [("-", trees[0], trees[1]), ("-", trees[2], trees[3])]
    names = [variables(tree) for tree in differences]
    if names[0] != names[1]:
        return False
    ratios = []
    for point in (*points(names[0], positive=True), *points(names[0], positive=False)):
        values = [value_at(tree, point) for tree in differences]
        if None in values:
            continue
        zeros = [value == 0 for value in values]
        if zeros[0] != zeros[1]:
            return False
        if not zeros[0]:
            ratios.append(ratio(*values))
    if len(ratios) < 2 or not all(close(ratios[0], other) for other in ratios[1:]):
        return False
    real = as_real(ratios[0])
    return equation or (real is not None and real > 0)
