"""Whether two values are equal: numbers as fractions, formulas at random points, and what is left by math-verify."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Literal

from qerl.data.formulas.evaluate import Value, as_real, close, close_rounded, evaluate
from qerl.data.formulas.expression import Tree, parse_expression, variables
from qerl.data.formulas.number import parse_number
from qerl.data.formulas.tokens import ExpressionError
from qerl.data.formulas.units import is_boxed_unit

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
    """The value of an expression at a point; None where it has none."""
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


_TAIL_UNIT = re.compile(
    r"\s*(?:\\(?:text|textrm|mathrm|mbox|rm)\s*\{\s*[^{}]*\}\s*(?:\^\s*\{?-?[1-4]\}?)?|\^\s*\{?\s*\\circ\s*\}?|\\degree|°"
    r"|(?<=[\d})\s])\s*(?:square |cubic |sq\.? |cu\.? )?(?:units|unit|cm|mm|km|meters|feet|ft|inches|miles|degrees"
    r"|dollars|hours|minutes|seconds|radians|rad)(?:\s*\^\s*\{?[1-4]\}?)?)$"
)


def _without_unit(text: str) -> str:
    """The value without a currency before it and a unit after it."""
    tail = _TAIL_UNIT.search(text)
    if tail and tail.start() > 0:
        content = (
            re.search(r"\{\s*([^{}]*?)\s*\}", tail[0])
            if "\\text" in tail[0] or "\\m" in tail[0] or "\\rm" in tail[0]
            else None
        )
        if content is None or is_boxed_unit(content[1]) or "circ" in tail[0]:
            return text[: tail.start()].strip()
    return text


def tree_of(text: str) -> Tree | None:
    """The expression that a text without its unit is; None if it is not understood."""
    try:
        return parse_expression(_without_unit(text))
    except (ExpressionError, RecursionError):
        return None


def endless(text: str) -> int:
    """1 for infinity, -1 for minus infinity, 0 for anything else."""
    bare = text.strip("(){} ")
    if bare.startswith("-"):
        return -1 if _INFINITY.fullmatch(bare[1:].strip()) else 0
    return 1 if _INFINITY.fullmatch(bare) else 0


DECIMAL = re.compile(r"\d\.\d")


def equal_values(gold: str, answer: str, fallback: Fallback) -> bool:
    """Whether two values are equal, as fractions, at random points, or by math-verify. Raises UndecidedError."""
    if re.sub(r"\s", "", gold) == re.sub(r"\s", "", answer):
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
    equal = equal_everywhere(*trees, rounded=any(DECIMAL.search(text) for text in (gold, answer)))
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

    At points with negative values only real values count, as roots and logarithms have several branches there. With
    `rounded`, values without variables need to agree to six decimal places only.
    """
    names = variables(one) | variables(other)
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
            if not close(*values) and not (rounded and not names and close_rounded(*values)):
                return False
            if not names:
                return True
    return True if compared >= 2 else None
