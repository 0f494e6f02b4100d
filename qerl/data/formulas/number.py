r"""The number that a short text states: "$1,800.00", "18 dollars", "−3", "\frac{1}{2}", "1.8 \times 10^3".

A text states a number if it is one literal (integer, decimal, fraction, mixed number, power, scientific notation) with
at most a sign, a currency, a percent or degree sign, a scale word ("million"), a unit, and an assignment before it ("x
= 18"). Words may follow that do not change it: "18 dollars a day" states 18, "18 or 19" does not. Anything else is not
a number: an unevaluated sum, a ratio, an interval, a factorial.

Values are exact fractions, so 18.0 equals 18 and 18.5 does not. Units are not converted: "1800 cents" states 1800.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from qerl.data.formulas.spelling import TEXT_BOX, strip_math, strip_outer


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SCALES = {
    "k": 10**3,
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}

_MAX_WORDS = 8
_POWER = re.compile(r"(?<=[A-Za-z)])\s*(?:\^\s*\{?\s*-?[1-4]\s*\}?|[²³])")
_CHARS = re.compile(r"[A-Za-zµμΩÅ°'’\-./() $€£¥₹]*")

# One-character symbols that are units, unless letters are variables.
_LETTER_UNITS = _words("m g s h L l W V J N K C F A $ € £ ¥ ₹ ° '")
_SHORT_UNITS = _words("cm mm km kg mg ml ft in mi hr hrs min sec ms rad lb lbs oz mph sq cu usd yd am pm")
# Words that may occur within a unit ("18 dollars a day") but not at its start ("18a").
_INNER = _words("a t by than")
# Words that change the number before them, and words that are mathematics.
NUMBER_WORDS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy "
    "eighty ninety"
)
ALTERS = NUMBER_WORDS | _words(
    "and or to not no but if mod base factorial squared cubed half halves third thirds quarter quarters tenths "
    "hundredths thousandths plus minus times over divided less root pi ln log lg exp sin cos tan cot sec csc sqrt "
    "frac cdot infinity inf"
)
_VARIABLES = frozenset("abcdefghijklmnopqrstuvwxyz") - _INNER
OF_VALUE = frozenset([*SCALES, *(f"{word}s" for word in SCALES), "percent"])


def is_unit(tail: str, algebra: bool) -> bool:
    """Whether the text after a literal is empty or a unit: words, slashes and small powers, but no mathematics.

    With `algebra`, a word of fewer than four letters is a product of variables unless it is a common unit.
    """
    tail = _POWER.sub("", tail)
    if not _CHARS.fullmatch(tail):
        return False
    if re.match(r"[.\-/(]", tail) and not re.match(r"[-(]?[A-Za-z]{2}", tail.replace("/", "", 1)):
        return False
    words = re.sub(r"[-/().]", " ", tail).split()
    if not words:
        return True
    if len(words) > _MAX_WORDS or any(_alters(word) for word in words):
        return False
    first = words[0]
    if algebra and first.isalpha() and len(first) < 4 and first.lower() not in _SHORT_UNITS:
        return False
    return first.lower() not in _INNER


def is_boxed_unit(text: str) -> bool:
    """Whether the content of a LaTeX text box is a unit; there a single letter is never a variable."""
    words = text.lower().replace(".", " ").split()
    return bool(words) and all(re.fullmatch(r"[a-z/²³]+", word) and word not in ALTERS | OF_VALUE for word in words)


def _alters(word: str) -> bool:
    return word.lower() in ALTERS or (word.lower() in _VARIABLES and word not in _LETTER_UNITS)


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
    rf"|(?P<plain>{_LITERAL})(?:[eE](?P<exp>[+-]?\d{{1,3}})(?!\d)"
    r"|\s*(?:\\times|\\cdot|[*×·x])\s*10\s*\^\s*\{?(?P<times10>[+-]?\d{1,3})\}?(?!\d))?"
)
_INTEGER = re.compile(r"-?[0-9]+")  # a shortcut for most answers
_EVENT = re.compile(r"\b(?:[A-Za-z]{1,2}\}?|[A-Z] )\([^()]*$")  # "P(X" of "P(X=0)", which states no number
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
    text = _after_equals(_OPTION.sub("", strip_math(text), count=1))
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


def _after_equals(text: str) -> str:
    """The text after the last equals sign, unless the text before it could be another answer."""
    if re.search(r"[<>≤≥≠]|!=|\\n?eq|\\[lg]e|\\ne", text):
        return text
    left, equals, right = text.rpartition("=")
    if _EVENT.search(left):
        return text
    listed = re.sub(r"(?<=\d),(?=\d{3})", "", left)
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
