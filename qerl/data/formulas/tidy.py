"""One spelling for an answer in LaTeX: without delimiters, spacing and labels, and each command by one name."""

from __future__ import annotations

import re

from qerl.data.formulas.latex import plain

_SYMBOLS = {
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "π": "\\pi ", "√": "\\sqrt ", "∞": "\\infty ", "×": "\\times ",
    "·": "\\cdot ", "⋅": "\\cdot ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ",
    "∈": "\\in ", "ℝ": "\\mathbb{R}", "²": "^2", "³": "^3", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
    "÷": "\\div ", "→": "\\to ", "≈": "\\approx ", "λ": "\\lambda ",
}  # fmt: skip
_REPLACEMENTS = (
    (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|textstyle|limits)(?![A-Za-z])\s*\.?(?=[^.]|$)", ""),
    (r"\\!\s*|\{,\}(?=\d)|\\hspace\s*\{[^{}]*\}|\\phantom\s*\{[^{}]*\}", ""),
    (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=|=<", r"\\le "),
    (r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\(?:neq|ne)(?![A-Za-z])|!=|\\not\s*=", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\langle(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])", ")"),
    (r"\\(?:varnothing|phi(?=$))(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
    (r"\\vert(?![A-Za-z])", "|"),
    (r"\\(?:R|Bbb\{R\}|Bbb R|mathbf\{R\}|mathbb\s*R)(?![A-Za-z])", r"\\mathbb{R}"),
    (r"\^\s*\{\s*\\prime\s*\}|\^\s*\\prime", "'"),
    (r"\\lor(?![A-Za-z])|\\vee(?![A-Za-z])|\\text\s*\{\s*,?\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])", r" \\or "),
    (r"\\land(?![A-Za-z])|\\text\s*\{\s*,?\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])|\s&\s(?!.*\\end)", r" \\and "),
    (r"\\\$|(?<!\\)\$|\\\(|\\\)|\\\]|(?<!\\)\\\[", ""),
    (r"\*\*|\\text\s*\{\s*\}", ""),
)
_REPLACE = tuple((re.compile(pattern), new) for pattern, new in _REPLACEMENTS)
LABEL = re.compile(
    r"^(?:\\text(?:bf)?\s*\{)?\s*(?:the\s+)?(?:final\s+)?(?:answers?|solutions?)(?:\s+is)?\s*(?:[:=]\s*\}?|\}?\s*[:=]|(?<=is)\s)\s*",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{(.*)\}$", re.DOTALL)
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")


def tidy(text: str) -> str:
    """The LaTeX without delimiters, spacing and labels, with one spelling of each command."""
    text = "".join(_SYMBOLS.get(char, char) for char in text)
    text = re.sub(r"\s+", " ", plain(text)).strip()
    text = LABEL.sub("", text, count=1)
    while box := _BOX.match(text):
        text = box[1].strip()
    for pattern, new in _REPLACE:
        text = pattern.sub(new, text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".").strip()
    if not re.search(r"[(\[{]", text):
        text = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    return text
