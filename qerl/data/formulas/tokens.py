"""The tokens of a LaTeX expression: numbers, variables, functions, commands and signs."""

from __future__ import annotations

import re
from dataclasses import dataclass


class ExpressionError(ValueError):
    """The text is not an expression of the kind described above, or it has no value at the point."""


_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|"
    "upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|ell|hbar"
)
_FUNCTIONS = (
    "arcsin|arccos|arctan|arcsec|arccsc|arccot|sinh|cosh|tanh|coth|sech|csch|sin|cos|tan|cot|sec|csc|ln|lg|log|exp"
)
_DECORATIONS = "overline|bar|vec|hat|tilde|widehat|overrightarrow|mathbf|boldsymbol|bm|mathcal|mathbb|dot"
_TEXT = "text|mathrm|mbox|textbf|textit|textrm|operatorname|mathit|mathsf|rm"
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d*\.\d*\\overline\{\d+\}|\d+\.?\d*|\.\d+)"
    r"|(?P<degree>\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![A-Za-z])|°)"
    rf"|\\(?P<word>{_TEXT})\s*\{{\s*(?P<content>[^{{}}]*?)\s*\}}"
    rf"|\\(?P<decoration>{_DECORATIONS})\s*(?:\{{\s*(?P<decorated>[^{{}}]*?)\s*\}}|(?P<bare>[A-Za-z]))"
    rf"|\\(?P<greek>{_GREEK})(?![A-Za-z])"
    rf"|(?:\\(?P<function>{_FUNCTIONS})(?![a-z])|(?P<plain>{_FUNCTIONS}|sqrt|pi)(?![a-z]))"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<letter>[A-Za-z])"
    r"|(?P<symbol>[-+*/^_(){}\[\]|!']))"
)


_WORD = re.compile(r"\s*(?<![A-Za-z\\])([a-z]{2,}|[A-Z][a-z]{3,})(?![A-Za-z])")
_SHORT_WORDS = frozenset(
    "for the and any all at is if in of to by no not but are can let then when with".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Token:
    """One token, of the kind number, degree, function, command, letter or symbol."""

    kind: str
    text: str


def _is_prose(letters: str) -> bool:
    """Whether letters in a row are a word, rather than a product of variables, whose order is mostly that of "abcd"."""
    if re.fullmatch(rf"(?:{_FUNCTIONS}|sqrt|pi).*", letters):
        return False
    return letters in _SHORT_WORDS or (
        len(letters) > 3 and bool(set(letters) & set("aeiou")) and list(letters) != sorted(letters)
    )


def _token(match: re.Match[str]) -> Token:
    if match["decoration"]:
        return Token("letter", f"{match['decoration']} {match['decorated'] or match['bare']}")
    if match["word"]:
        content = match["content"]
        if content in ("e", "i"):
            return Token("letter", content)
        if re.fullmatch(_FUNCTIONS, content):
            return Token("function", content)
        if not content.isalpha():
            raise ExpressionError(f"the text {content!r} is no name")
        return Token("letter", content if len(content) == 1 else f"text {content.casefold()}")
    for kind in ("number", "degree", "function", "command", "letter", "symbol"):
        if match[kind] is not None:
            return Token(kind, match[kind])
    if match["plain"]:
        return Token("command" if match["plain"] in ("sqrt", "pi") else "function", match["plain"])
    return Token("letter", match["greek"])


def tokens(text: str) -> list[Token]:
    """All tokens of the text. Raises ExpressionError at anything that is none, and at words."""
    found, position = [], 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        word = _WORD.match(text, position)
        if word and _is_prose(word[1]):
            raise ExpressionError(f"{word[1]!r} is a word")
        if match is None:
            raise ExpressionError(f"{text[position : position + 10]!r} is not understood")
        found.append(_token(match))
        position = match.end()
    return found
