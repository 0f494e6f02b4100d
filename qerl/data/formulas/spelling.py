"""One spelling for an answer in LaTeX: without delimiters, spacing, labels and boxes, and each command by one name.

The results are for reading values from, not for showing; they may not be valid LaTeX any more.
"""

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


_SMALL_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
TEXT_BOX = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|bf|rm|mbox|hbox|operatorname|boxed|fbox|framebox)"
    r"\s*\{([^{}]*)\}"
)
_MARKS = (("__", "__"), ("“", "”"), ("`", "`"), ('"', '"'), ("*", "*"))


def strip_math(text: str) -> str:
    """A number's text without typesetting, bold print and text boxes."""
    text = tidy(text).replace("\\%", "%")
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
        if text[:1] + text[-1:] in ("()", "{}") and one_pair(text):
            text = text[1:-1]
        if text == before:
            return text


OPEN, CLOSE = "([{", ")]}"


def one_pair(text: str) -> bool:
    """Whether the bracket that opens the text is closed at its end only; ")" may close "[" and the other way round."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char in OPEN) - (char in CLOSE)
        if depth == 0:
            return index == len(text) - 1
    return False


_SYMBOLS = {
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "π": "\\pi ", "√": "\\sqrt ", "∞": "\\infty ", "×": "\\times ",
    "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "•": "\\cdot ", "∗": "*", "✕": "\\times ", "✖": "\\times ",
    "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ",
    "∈": "\\in ", "ℝ": "\\mathbb{R}", "²": "^2", "³": "^3", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
    "÷": "\\div ", "→": "\\to ", "≈": "\\approx ", "λ": "\\lambda ",
}  # fmt: skip
_REPLACEMENTS = (
    (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|textstyle|limits)(?![A-Za-z])\s*\.?(?=[^.]|$)", ""),
    (r"\\!\s*|\{,\}(?=\d)|\\hspace\s*\{[^{}]*\}|\\phantom\s*\{[^{}]*\}", ""),
    (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
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
# An interval whose open ends have their brackets turned outwards, as in French: ]1, 2[ is (1, 2).
_TURNED = re.compile(
    r"(?P<before>^|[=,;(]|\\(?:cup|cap|in|setminus|and|or)(?![A-Za-z]))\s*"
    r"(?P<open>[\[\]])(?P<ends>[^\[\],;]+[,;][^\[\],;]+)(?P<close>[\[\]])"
)
_REPLACE = tuple((re.compile(pattern), new) for pattern, new in _REPLACEMENTS)
LABEL = re.compile(
    r"^(?:\\text(?:bf)?\s*\{)?\s*(?:the\s+)?(?:final\s+)?(?:answers?|solutions?)(?:\s+is)?\s*(?:[:=]\s*\}?|\}?\s*[:=]|(?<=is)\s+\}?)\s*",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{(.*)\}$", re.DOTALL)
GROUPED = re.compile(r"(?<![\d,.])(?<![A-Za-z]\()(?<!\[)\d{1,3}(?:,\d{3})+(?![\d,])")  # thousands; no arguments


def _as_usual(turned: re.Match[str]) -> str:
    """An interval with the open ends in round brackets."""
    first, last = "(["[turned["open"] == "["], ")]"[turned["close"] == "]"]
    return f"{turned['before']}{first}{turned['ends']}{last}"


def tidy(text: str) -> str:
    """The LaTeX without delimiters, spacing and labels, with one spelling of each command."""
    text = "".join(_SYMBOLS.get(char, char) for char in text)
    text = re.sub(r"\s+", " ", plain(text)).strip()
    text = LABEL.sub("", text, count=1)
    while box := _BOX.match(text):
        text = box[1].strip()
    for pattern, new in _REPLACE:
        text = pattern.sub(new, text)
    text = _TURNED.sub(_as_usual, text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".").strip()
    name, equals, value = text.rpartition("=")
    if not re.search(r"[(\[{]", TEXT_BOX.sub("", value)):
        start = len(name + equals) if re.search(r"[(\[{]", name) else 0
        text = text[:start] + GROUPED.sub(lambda match: match[0].replace(",", ""), text[start:])
    return text
