"""Reading the number that a short text states: "$1,800.00", "18 dollars", "−3", "\\frac{1}{2}", "1.8 \\times 10^3".

A text states a number if it is one literal (integer, decimal, fraction, mixed number, power, scientific notation) with
at most a sign, a currency, a percent or degree sign, a scale word ("million"), a unit, and an assignment before it
("x = 18"). Anything else is not a number: two numbers, an unevaluated sum, a ratio, an interval, a factorial. Values
are exact fractions, so 18.0 equals 18 and 18.5 does not. Units are not converted: "1800 cents" states 1800.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from qerl.data.formulas.latex import TEXT_BOX, strip_math, strip_outer
from qerl.data.formulas.shape import is_name
from qerl.data.formulas.units import SCALES, is_boxed_unit, is_unit

MAX_CHARS = 1000
_MAX_EXPONENT = 400  # no answer is a larger number, and computing one would cost memory

_INT = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ _]\d{3})+(?!\d)|\d+"
_LITERAL = rf"(?:(?:{_INT})(?:\.\d+|\.(?!\s*[A-Za-z]))?|\.\d+)"
_SIGN = r"[+-]?\s*"
_BODY = re.compile(
    rf"(?P<mixed>\d+)\s*(?:\s(?P<mixed_a>\d+)\s*/\s*(?P<mixed_b>\d+)|\\frac\{{(?P<mixed_c>\d+)\}}\{{(?P<mixed_d>\d+)\}})"
    rf"|\\frac\{{(?P<top>{_SIGN}{_LITERAL})\}}\{{(?P<bottom>{_SIGN}{_LITERAL})\}}"
    rf"|(?P<over>{_LITERAL})\s*/\s*(?P<under>{_SIGN}{_LITERAL})(?![\d/])"
    rf"|(?P<base>\d+)\^\{{?(?P<power>[+-]?\d{{1,3}})\}}?(?!\d)"
    r"|(?P<whole>\d*)\.(?P<fixed>\d*)\\overline\{(?P<repeat>\d+)\}"
    rf"|(?P<plain>{_LITERAL})(?:[eE](?P<exp>[+-]?\d{{1,3}})(?!\d)"
    r"|\s*(?:\\times|\\cdot|[*×·x])\s*10\s*\^\s*\{?(?P<times10>[+-]?\d{1,3})\}?(?!\d))?"
)
_INTEGER = re.compile(r"-?[0-9]+")  # a shortcut for most answers
_CURRENCY = r"(?:US\$|USD\s|Rs\.?\s?|[$€£¥₹])"
_PREFIX = re.compile(rf"(?:\\approx|≈)?\s*(?P<sign>[+-]?)\s*(?:{_CURRENCY})?\s*(?P<sign2>[+-]?)\s*", re.IGNORECASE)
_MINUS_WORD = re.compile(r"^(?:minus|negative)\s+(?=[\d.$\\])", re.IGNORECASE)
_OPTION = re.compile(r"^\(?[A-E]\)\s+(?=[-$\\.\d])")  # "(C) 18" of a multiple-choice problem
_PERCENT = re.compile(r"\s*\\?(?:%|percent\b|per cent\b)", re.IGNORECASE)
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\circ)")
_SCALE = re.compile(r"\s*\b(hundred|thousand|million|billion|trillion|dozen)s?\b|(k)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Number:
    """An exact value; `percent` says that it had a percent sign (18% has the value 18)."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """Whether the values are equal; if only one has a percent sign, it may count (18% = 0.18) or not (18% = 18)."""
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        part, whole = (self, other) if self.percent else (other, self)
        return part.value / 100 == whole.value

    def terminates(self) -> bool:
        """Whether a finite decimal equals it exactly."""
        rest = self.value.denominator
        for prime in (2, 5):
            while rest % prime == 0:
                rest //= prime
        return rest == 1


def parse_number(text: str, algebra: bool = False) -> Number | None:
    """The number that `text` states, or None.

    With `algebra`, letters after the literal are variables ("3m" is 3 times m) unless they spell a unit of at least
    four letters or a common one (cm); within a LaTeX text box they are always a unit.
    """
    if not text or len(text) > MAX_CHARS:
        return None
    if _INTEGER.fullmatch(text):
        return Number(Fraction(int(text)))
    if algebra:
        text = TEXT_BOX.sub(lambda box: " units " if is_boxed_unit(box[1]) else box[0], text)
    text = _after_equals(_OPTION.sub("", strip_math(text), count=1), algebra)
    text = _MINUS_WORD.sub("-", text, count=1)
    prefix = _PREFIX.match(text)
    body = _BODY.match(text, prefix.end())
    if body is None or (prefix["sign"] and prefix["sign2"]):
        return None
    value = _value(body.groupdict())
    if value is None:
        return None
    sign = -1 if "-" in (prefix["sign"], prefix["sign2"]) else 1
    return _with_tail(sign * value, text[body.end() :], algebra)


def _after_equals(text: str, algebra: bool) -> str:
    """The text after the last equals sign, unless the text before it could be another answer.

    With `algebra` the text before it has to be a name ("x", "f(2)") or a calculation: "2x=5" is an equation.
    """
    if re.search(r"[<>≤≥≠]|!=|\\n?eq|\\[lg]e|\\ne", text):
        return text
    left, equals, right = text.rpartition("=")
    listed = re.sub(r"(?<=\d),(?=\d{3})", "", left)
    first = left.partition("=")[0].strip()
    if algebra and not is_name(first) and re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", left)):
        return text
    if equals and not re.search(r"[,;]|\b(?:and|or)\b", listed):
        return strip_outer(right)
    return text


def _value(part: dict[str, str | None]) -> Fraction | None:
    """The magnitude that a match of _BODY states; None if it divides by zero or is far too large."""
    try:
        if part["mixed"]:
            top, bottom = (part["mixed_a"] or part["mixed_c"]), (part["mixed_b"] or part["mixed_d"])
            return int(part["mixed"]) + Fraction(int(top), int(bottom))
        if part["top"]:
            return _literal(part["top"]) / _literal(part["bottom"])
        if part["over"]:
            return _literal(part["over"]) / _literal(part["under"])
        if part["base"]:
            power = int(part["power"])
            return Fraction(int(part["base"])) ** power if abs(power) * len(part["base"]) <= _MAX_EXPONENT else None
        if part["repeat"]:
            scale = 10 ** len(part["fixed"])
            cycle = Fraction(int(part["repeat"]), 10 ** len(part["repeat"]) - 1)
            return Fraction(int((part["whole"] + part["fixed"]) or "0"), scale) + cycle / scale
        exponent = int(part["exp"] or part["times10"] or 0)
        return _literal(part["plain"]) * Fraction(10) ** exponent if abs(exponent) <= _MAX_EXPONENT else None
    except ZeroDivisionError:
        return None


def _literal(text: str) -> Fraction:
    return Fraction(re.sub(r"[,_ ]", "", text).rstrip(".") or "0")


def _with_tail(value: Fraction, tail: str, algebra: bool) -> Number | None:
    """The number, if its literal is followed by a percent sign, a degree sign, a scale word, a unit or nothing."""
    if percent := _PERCENT.match(tail):
        return Number(value, percent=True) if is_unit(tail[percent.end() :], algebra) else None
    if degree := _DEGREE.match(tail):
        tail = tail[degree.end() :]
    elif (scale := _SCALE.match(tail)) and not (algebra and scale[2]):
        value *= SCALES[(scale[1] or scale[2]).lower()]
        tail = tail[scale.end() :]
    tail = re.sub(r"^(?:st|nd|rd|th)\b", "", tail)
    return Number(value) if is_unit(tail, algebra) else None
