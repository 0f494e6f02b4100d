"""Whether an answer only repeats an expression of the question, which the question asked to evaluate.

"Compute $\\sqrt{12}+\\sqrt{27}$" is not answered by `\\sqrt{12}+\\sqrt{27}`, although that equals 5\\sqrt{3}. An answer
is a copy if it has an operation in it, is written differently from the task's answer, and stands in the question, as it
is or with its parts in another order. A number or a fraction in lowest terms is never a copy.
"""

from __future__ import annotations

import math
import re
from collections import Counter

from qerl.data.formulas.shape import is_name
from qerl.data.formulas.tidy import tidy

_OPERATION = re.compile(
    r"(?<=.)[-+*/!]|\^(?!\{?\\circ)|\\(?:frac|sqrt|cdot|times|div|binom|log|ln|exp|sin|cos|tan|cot|sec|csc|arc\w+|int|sum"
    r"|prod|lim|lfloor|lceil|pmod|bmod|gcd|det)(?![A-Za-z])|[=<>|]|\\[lg]e(?![A-Za-z])|\\begin"
)
_FRACTION = re.compile(r"-?(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|[^\s(){}\[\]]")
_MIN_TOKENS = 3
_MAX_QUESTION_CHARS = 20_000


def is_copied(stated: str, answer: str, question: str) -> bool:
    """Whether `stated`, which equals the task's `answer`, is an expression of `question` left as it was."""
    mine, theirs = _bare(stated), _bare(answer)
    name, _, value = mine.partition("=")
    candidates = {value} if value and is_name(name) else {mine, mine.rpartition("=")[2]} - {""}
    if theirs in candidates or mine == theirs:
        return False
    question = question[:_MAX_QUESTION_CHARS]
    whole = _bare(question)
    formulas = [
        _tokens(part) for formula in _formulas(question) for part in (formula, *re.split(r"=|\\ge|\\le", formula))
    ]
    for text in filter(_unevaluated, candidates):
        tokens = _tokens(text)
        reordered = tokens.total() >= _MIN_TOKENS and tokens in formulas and tokens != _tokens(theirs)
        if reordered or _stands_in(text, whole):
            return True
    return False


def _bare(text: str) -> str:
    """The text without white space and with one spelling of products."""
    text = re.sub(r"(?<![\w}])(\d+)\s?/\s?(\d+)(?!\w)", r"\\frac{\1}{\2}", tidy(text))
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"\\(?:times|ast)(?![A-Za-z])|(?<!\*)\*(?!\*)", r"\\cdot", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    while re.fullmatch(r"\(.*\)", text) and text.count("(") == 1:
        text = text[1:-1]
    return text


def _formulas(question: str) -> list[str]:
    return [_bare(next(group for group in match.groups() if group)) for match in _FORMULA.finditer(question)]


def _tokens(text: str) -> Counter[str]:
    """How often each token occurs, brackets aside."""
    return Counter(_TOKEN.findall(text))


def _unevaluated(text: str) -> bool:
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        top, bottom = (int(part) for part in fraction.groups() if part)
        return math.gcd(top, bottom) > 1 or bottom == 1
    return bool(_OPERATION.search(text))


def _stands_in(text: str, question: str) -> bool:
    """Whether the text occurs in the question as more than the end or the beginning of a longer number or name."""
    start = question.find(text)
    while start >= 0:
        before, after = question[:start][-1:], question[start + len(text) :][:1]
        cut = (text[0].isdigit() and before.isdigit()) or (text[-1].isdigit() and after.isdigit()) or before == "\\"
        if not cut and after not in ("^", "!", "_"):
            return True
        start = question.find(text, start + 1)
    return False
