"""Removing from an answer whatever is only typesetting: typography, LaTeX spacing, math delimiters, boxes, brackets.

The results are for reading values from, not for showing; they may not be valid LaTeX any more.
"""

from __future__ import annotations

import re
import unicodedata


def plain(text: str) -> str:
    """The text with ASCII digits, minus signs, slashes and spaces, and without invisible characters.

    Superscripts and the like are left alone, as "18²" is not 182.
    """
    return "".join(_plain_char(char) if ord(char) > 127 or char.isspace() else char for char in text)


def _plain_char(char: str) -> str:
    code, category = ord(char), unicodedata.category(char)
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if 0xFF01 <= code <= 0xFF5E:
        return chr(code - 0xFEE0)
    if char in "−﹣–‐‑":
        return "-"
    if char in "⁄∕":
        return "/"
    if char in "，،٬":
        return ","
    if char == "٫":
        return "."
    if category in ("Cf", "Mn"):
        return ""
    if category == "Zs" or char.isspace():
        return " "
    fraction = unicodedata.decomposition(char)
    if fraction.startswith("<fraction>") and len(fraction.split()) == 4:
        return " " + "".join(chr(int(code, 16)) for code in fraction.split()[1:]).replace("⁄", "/")
    return char


_SPACES = re.compile(r"\\[,;:!> ]|~|\\q?quad\b|\\(?:left|right|displaystyle|textstyle|limits|big|Big)(?![A-Za-z])|\s+")
_SMALL_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
TEXT_BOX = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|bf|rm|mbox|hbox|operatorname|boxed|fbox|framebox)"
    r"\s*\{([^{}]*)\}"
)
_MARKS = (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("“", "”"))
_MARKS += (("$", "$"), ("`", "`"), ('"', '"'), ("*", "*"))


def strip_math(text: str) -> str:
    """`plain` text without typesetting: math delimiters, spacing commands, \\left, \\dfrac, bold, text boxes."""
    text = plain(text).replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\!", "")
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = _SPACES.sub(" ", text)
    text = _SMALL_FRAC.sub(
        lambda m: f"\\frac{{{(m[1] or m[2] or '').strip()}}}{{{(m[3] or m[4] or '').strip()}}}", text
    )
    for _ in range(4):  # boxes may be nested; no number is nested deeper than this
        before, text = text, TEXT_BOX.sub(r" \1 ", text)
        if before == text:
            break
    return strip_outer(text)


def strip_outer(text: str) -> str:
    """The text without delimiters and brackets that enclose all of it, without outer white space and final period."""
    while True:
        before = text
        text = text.strip(" \n\t").rstrip(" .,;:")
        for left, right in _MARKS:
            inner = text[len(left) : -len(right)]
            if inner and text.startswith(left) and text.endswith(right) and left not in inner and right not in inner:
                text = inner
        if text[:1] in ("(", "{") and _closes_at(text) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def _closes_at(text: str) -> int:
    """The index at which the bracket that opens the text is closed; -1 if it is not."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char == text[0]) - (char == {"(": ")", "{": "}"}[text[0]])
        if depth == 0:
            return index
    return -1
