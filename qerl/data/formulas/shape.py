"""The shape of a mathematical answer: a list, a pair, an interval, an equation, a time of day, or a single value.

Shapes are read from the text alone, so that each part of an answer is compared with the part that it stands for, and
none is dropped: `x=2,3` is the values 2 and 3, `x^2+y^2=25` is an equation and not the value 25, and `6:30` is not the
ratio 1:5. qerl/data/formulas/equality.py compares shapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from qerl.data.formulas.spelling import CLOSE, GROUPED, OPEN, one_pair, tidy

Kind = Literal["value", "list", "set", "ordered", "union", "relation", "parts", "words"]


@dataclass(frozen=True)
class Shape:
    """One answer or a part of one.

    "value" has `text` only. "list" (bare) and "set" (in braces) hold `items` in any order, "ordered" in theirs with
    the brackets in `text`, "union" sets in any order. "relation" holds the sides, and in `text` the signs between them.
    "parts" are the parts of a clock time, ratio or quantity with several
    units, with its kind in `text`. "words" has the words in `text`.
    """

    kind: Kind
    text: str = ""
    items: tuple[Shape, ...] = ()


def _pieces(text: str, separators: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between the separators that stand outside of all brackets, and these separators."""
    parts, found, start, depth, at = [], [], 0, 0, 0
    while at < len(text):
        match = separators.match(text, at) if depth == 0 else None
        if match:
            parts.append(text[start:at].strip())
            found.append(match[0].strip())
            start = at = match.end()
            continue
        if text.startswith(("\\begin", "\\end"), at):
            depth += 1 if text.startswith("\\begin", at) else -1
        elif text[at] == "\\" and text[at + 1 : at + 2] not in ("{", "}"):
            at += 1
        depth += (text[at : at + 1] in OPEN) - (text[at : at + 1] in CLOSE)
        at += 1
    return [*parts, text[start:].strip()], found


_LIST = re.compile(r",\s*\\(?:and|or)\s|;\s*\\(?:and|or)\s|\s?\\(?:and|or)\s|[,;]")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|sim)(?![A-Za-z])|[=<>]")
_SUCH_THAT = re.compile(r"\\mid(?![A-Za-z])|\||:")
_NAME = re.compile(
    r"(?:\\text\s*\{[^{}]*\}|\\(?:mathrm|operatorname|vec|overline|mathbf|hat)\s*\{[^{}]*\}|\\(?:angle|triangle)\s*[A-Z]+"
    r"|\\m?angle\s*\d|m\s*\\angle\s*[A-Z]+|[A-Z]{2,4}|\|[A-Z]{2}\||[a-zA-Z]{4,}(?: [a-z]+)*"
    r"|\\[A-Za-z]+(?<!sin)(?<!cos)(?<!tan)(?<!log)(?<!ln)(?<!pi)(?<!circ)|[A-Za-z])"
    r"'*(?:_(?:[0-9A-Za-z]|\{[^{}]*\}))?(?:\^\{-1\})?'*(?P<of>\s*\([^()]*\))?"
    r"|\\frac\s*\{d\s*\^?2?\s*[a-z]?\}\s*\{d\s*[a-z]\s*\^?2?\}"
)


def is_name(text: str) -> bool:
    """Whether a side of an equation only names what the other side states: "x", "f(x)", "a_n", "AB"."""
    return text not in ("e", "i", "\\infty", "\\emptyset") and _NAME.fullmatch(text) is not None


@lru_cache(4096)  # the completions of a prompt mostly state the same few answers
def read(text: str) -> Shape:
    """The shape of an answer."""
    return _shape(tidy(text), 0)


@lru_cache(4096)
def read_single(text: str) -> Shape:
    """The shape of an answer where the right one is a single value: (1,000) is a number there, and no pair."""
    return _shape(GROUPED.sub(lambda match: match[0].replace(",", ""), tidy(text)), 0)


def is_single(shape: Shape) -> bool:
    """Whether no part of an answer is a pair, a list or a set."""
    return shape.kind in ("value", "relation", "parts", "words") and all(map(is_single, shape.items))


def _shape(text: str, depth: int) -> Shape:
    text = text.strip()
    if depth > 12:
        return Shape("value", text)
    if special := _words(text) or _parts(text):
        return special
    items, _ = _pieces(text, _LIST)
    items = [item for item in items if item]
    if len(items) > 1:
        shapes = [_shape(item, depth + 1) for item in items]
        return Shape(
            "list", items=tuple(part for each in shapes for part in (each.items if each.kind == "list" else [each]))
        )
    if items and items[0] != text:
        text = items[0]
    sides, signs = _pieces(text, _RELATION)
    if signs:
        return _relation(sides, signs, depth)
    members, _ = _pieces(text, _UNION)
    if len(members) > 1:
        return Shape("union", items=tuple(_shape(member, depth + 1) for member in members))
    return _plus_minus(text, depth) or _enclosed(text, depth) or Shape("value", text)


def is_assignment(shape: Shape) -> bool:
    """Whether an equation gives a value to a bare name, or to a calculation: "x = 18", "9+9 = 18"."""
    if shape.kind != "relation" or set(shape.text.split()) != {"="}:
        return False
    texts = [re.sub(r"\\[A-Za-z]+", "", item.text) for item in shape.items]
    return is_name(shape.items[0].text) or not any(re.search("[A-Za-z]", text) for text in texts)


def _relation(sides: list[str], signs: list[str], depth: int) -> Shape:
    parts = tuple(_shape(side, depth + 1) for side in sides)
    if signs == ["\\in"]:
        return parts[1]
    if not sides[0] and set(signs) <= {"=", "\\approx"}:  # "= 5"
        return parts[-1]
    if signs[-1] == "\\approx" and set(signs[:-1]) == {"="}:
        return _relation(sides[:-1], signs[:-1], depth)
    if set(signs) == {"="}:
        if is_name(sides[0]):
            return Shape("relation", "=", (Shape("value", sides[0]), parts[-1]))
        if is_name(sides[-1]) and len(sides) == 2:
            return Shape("relation", "=", (Shape("value", sides[1]), parts[0]))
    return Shape("relation", " ".join(signs), parts)


def _plus_minus(text: str, depth: int) -> Shape | None:
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return None
    both = (
        re.sub(r"\\pm(?![A-Za-z])", first, re.sub(r"\\mp(?![A-Za-z])", second, text)) for first, second in ("+-", "-+")
    )
    return Shape("list", items=tuple(_shape(one, depth + 1) for one in both))


def _enclosed(text: str, depth: int) -> Shape | None:
    """A text that one pair of brackets encloses: a set, a tuple or interval, or a value in brackets."""
    if text.startswith("\\{") and text.endswith("\\}"):
        inside = text[2:-2].strip()
        condition, found = _pieces(inside, _SUCH_THAT)
        if len(found) == 1 and re.fullmatch(r"\(?[A-Za-z, ]+\)?(?:\s*\\in\s*\\mathbb\{R\})?", condition[0]):
            return _shape(condition[1], depth + 1)
        shape = _shape(inside, depth + 1)
        return Shape("set", items=shape.items if shape.kind == "list" else (shape,))
    if text[:1] not in tuple("([{") or text[-1:] not in tuple(")]}") or len(text) < 2 or not one_pair(text):
        return None
    items, found = _pieces(text[1:-1], re.compile(r"[,;]"))
    if found and all(items) and text[0] in "([":
        return Shape("ordered", text[0] + text[-1], tuple(_shape(item, depth + 1) for item in items))
    if text[0] + text[-1] in ("()", "{}"):
        return _shape(text[1:-1], depth + 1)
    return None


_CLOCK = re.compile(
    r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(?:\\text\s*\{|\\mathrm\s*\{)?\s*(a\.?\s?m\.?|p\.?\s?m\.?)?\s*\}?", re.IGNORECASE
)
_RATIO = re.compile(r":|\\colon(?![A-Za-z])")
_HOUR = re.compile(r"(\d{1,2})\s*(?:\\text\s*\{|\\mathrm\s*\{)?\s*(a\.?\s?m|p\.?\s?m)\.?\s*\}?", re.IGNORECASE)
_QUANTITY = re.compile(
    r"(\d+(?:\.\d+)?|\\frac\s*\{\d+\}\s*\{\d+\})\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*([A-Za-z]+)\.?,?(?:\s*\\and)?\s*\}|([A-Za-z]+))"
    r"(?![A-Za-z])\s*(?:,|\\and)?\s*"
)


def _parts(text: str) -> Shape | None:
    """A time of day, a ratio, or a quantity with several units."""
    if clock := _CLOCK.fullmatch(text):
        half = (clock[4] or "").lower()[:1]
        return Shape(
            "parts", f"clock {half}".strip(), tuple(Shape("value", part) for part in clock.groups()[:3] if part)
        )
    if hour := _HOUR.fullmatch(text):
        return Shape("parts", f"clock {hour[2].lower()[:1]}", (Shape("value", hour[1]), Shape("value", "00")))
    ratio, found = _pieces(text, _RATIO)
    if found and all(ratio) and not re.search(r"[=<>]|\\(?:to|mid|in)\b", text):
        return Shape("parts", "ratio", tuple(_shape(part, 11) for part in ratio))
    quantities = list(_QUANTITY.finditer(text))
    if len(quantities) > 1 and "".join(match[0] for match in quantities) == text:
        units = [(match[2] or match[3]).casefold().rstrip("s") for match in quantities]
        if all(len(unit) > 1 or match[2] for unit, match in zip(units, quantities, strict=True)):
            return Shape("parts", " ".join(units), tuple(Shape("value", match[1]) for match in quantities))
    return None


_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|rm)\s*\{([^{}]*)\}")


def _words(text: str) -> Shape | None:
    """An answer in words or a choice ("(C)", "\\text{Evelyn}")."""
    boxed = bool(_TEXT.search(text))
    words = re.sub(r"[\s\-.,'’!]+", " ", _TEXT.sub(r" \1 ", text)).strip()
    words = re.sub(r"^\(\s*([A-Za-z ]+?)\s*\)$", r"\1", words).replace("\\and", "and").replace("\\or", "or")
    letters = words.replace(" ", "")
    if not letters.isalpha():
        return None
    if boxed or len(letters) > 3 or letters.isupper() or letters.casefold() in ("yes", "no", "all", "any"):
        return Shape("words", words.casefold())
    return None
