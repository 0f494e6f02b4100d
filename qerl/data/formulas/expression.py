r"""LaTeX expressions as trees, read without any library for algebra.

Every token has to be understood: anything else raises ExpressionError, so no part of an answer is dropped.

Conventions: letters are variables, except e, i and \pi; upper and lower case differ; "xy" is a product; \log without
a base is the natural logarithm; "a/bc" is a/(bc); "2\frac{1}{3}" is a mixed number; degrees count within trigonometric
functions, and a degree sign elsewhere is a unit.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any


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


# A word rather than a product of variables, which mostly has no vowels and is in alphabetical order.
_WORD = re.compile(
    rf"\s*(?<![A-Za-z\\])(?!{_FUNCTIONS}|sqrt|pi)(?=[A-Za-z]*[aeiou])(?P<letters>[A-Za-z]{{4,}})(?![A-Za-z])"
)


@dataclass(frozen=True)
class Token:
    """One token, of the kind number, degree, function, command, letter or symbol."""

    kind: str
    text: str


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
    """All tokens of the text. Raises ExpressionError at anything that is none, at words, and for too many of them."""
    found, position = [], 0
    text = text.strip()
    while position < len(text):
        if len(found) == MAX_TOKENS:
            raise ExpressionError("the expression is too long")
        match = _TOKEN.match(text, position)
        word = _WORD.match(text, position)
        if word and list(word["letters"]) != sorted(word["letters"]):
            raise ExpressionError(f"{word['letters']!r} is a word")
        if match is None:
            raise ExpressionError(f"{text[position : position + 10]!r} is not understood")
        found.append(_token(match))
        position = match.end()
    return found


MAX_NESTING, MAX_TOKENS = 30, 300  # evaluation recurses, and no real answer is nested so deeply or so long

Tree = tuple[Any, ...]  # (operation, operands...)


_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "sec": "arcsec", "csc": "arccsc", "cot": "arccot"}
_TRIGONOMETRIC = frozenset(_INVERSE)
_MINUS_ONE: Tree = ("neg", ("number", Fraction(1)))


@lru_cache(4096)
def parse_expression(text: str) -> Tree:
    """The tree of an expression. Raises ExpressionError if any part of it is not understood."""
    parser = _Parser(tokens(text))
    tree = parser.sum()
    if parser.next is not None:
        raise ExpressionError(f"{parser.next.text!r} is not expected there")
    return tree


_OPERATORS = dict.fromkeys([("symbol", "*"), ("command", "cdot"), ("command", "times"), ("command", "ast")], "*")
_OPERATORS |= dict.fromkeys([("symbol", "/"), ("command", "div")], "/")
_ENCLOSED = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil"), "lvert": ("rvert", "abs")}
_CLOSED_BY = {"(": ")", "[": "]", "{": "}", "|": "|"}


class _Parser:
    """Recursive descent: a sum of products of implicit products of powers."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bars = 0  # absolute values that are open
        self._trigonometric = False

    @property
    def next(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next_is(self, kind: str, text: str | None = None) -> bool:
        token = self.next
        return token is not None and token.kind == kind and text in (None, token.text)

    def _take(self) -> Token:
        token = self.next
        if token is None:
            raise ExpressionError("the expression ends too early")
        self._at += 1
        return token

    def _take_if(self, text: str, kind: str = "symbol") -> bool:
        found = self._next_is(kind, text)
        self._at += found
        return found

    def _expect(self, text: str, kind: str = "symbol") -> None:
        if not self._take_if(text, kind):
            raise ExpressionError(f"{text!r} is missing")

    def sum(self) -> Tree:
        """A sum of terms, up to a token that belongs to none."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ExpressionError("the expression is nested too deeply")
        tree = self._term()
        while self._next_is("symbol", "+") or self._next_is("symbol", "-"):
            operation = self._take().text
            tree = (operation, tree, self._term())
        self._depth -= 1
        return tree

    def _term(self) -> Tree:
        return self._signed(self._product)

    def _product(self) -> Tree:
        tree = self._implicit_product()
        while (token := self.next) is not None and (operation := _OPERATORS.get((token.kind, token.text))):
            self._take()
            tree = (operation, tree, self._signed(self._implicit_product))
        return tree

    def _signed(self, read: Any) -> Tree:
        sign = 1
        while self._next_is("symbol", "-") or self._next_is("symbol", "+"):
            sign *= -1 if self._take().text == "-" else 1
        tree = read()
        return tree if sign == 1 else ("neg", tree)

    def _starts_factor(self) -> bool:
        token = self.next
        if token is None or token.kind == "degree":
            return False
        if token.kind == "command":
            return token.text in ("frac", "sqrt", "pi", "binom", "lfloor", "lceil", "lvert", "infty")
        if token.kind == "symbol":
            return token.text in "({[" or (token.text == "|" and not self._bars)
        return True

    def _implicit_product(self, in_argument: bool = False) -> Tree:
        """Factors without a sign between them. Two numbers in a row are not a product, but may be a mixed number."""
        first = self.next
        tree = last = self._power()
        while self._starts_factor() and not (in_argument and self.next.kind == "function"):
            token = self.next
            if token.kind == "number" and last != ("constant", "pi"):
                raise ExpressionError("two numbers stand side by side")
            factor = last = self._power()
            mixed = first is not None and first.kind == "number" and _is_integer(tree) and _is_proper(factor)
            tree = ("+", tree, factor) if mixed else ("*", tree, factor)
        return tree

    def _power(self) -> Tree:
        tree = self._postfix(self._atom())
        if self._take_if("^"):
            exponent = self._exponent()
            if tree[0] == "variable" and exponent == _MINUS_ONE:  # the inverse of a function, if a number follows
                tree = ("variable", tree[1] + self._given())
            tree = self._postfix(("^", tree, exponent))
        return tree

    def _exponent(self) -> Tree:
        if self._take_if("{"):
            inside = self.sum()
            self._expect("}")
            return inside
        return self._signed(self._atom)

    def _postfix(self, tree: Tree) -> Tree:
        while True:
            if self._take_if("!"):
                tree = ("!", tree)
            elif self._next_is("degree"):
                self._take()
                tree = ("degree", tree) if self._trigonometric else tree
            else:
                return tree

    def _atom(self) -> Tree:
        token = self._take()
        if token.kind == "number":
            return ("number", _number(token.text))
        if token.kind == "letter":
            return self._variable(token.text)
        if token.kind == "function":
            return self._function(token.text)
        if token.kind == "symbol" and token.text in "({[":
            return self._until(_CLOSED_BY[token.text])
        if token.kind == "symbol" and token.text == "|":
            self._bars += 1
            tree = ("abs", self.sum())
            self._expect("|")
            self._bars -= 1
            return tree
        if token.kind == "command":
            return self._command(token.text)
        raise ExpressionError(f"{token.text!r} is not expected there")

    def _until(self, closing: str) -> Tree:
        bars, self._bars = self._bars, 0
        tree = self.sum()
        self._expect(closing)
        self._bars = bars
        return tree

    def _variable(self, name: str) -> Tree:
        while self._take_if("'"):
            name += "'"
        if self._take_if("_"):
            name += f"_{self._subscript()}"
        if name in ("e", "i"):
            return ("constant", name)
        return ("variable", name + self._given())

    def _given(self) -> str:
        """The number in brackets after a name: "I(0)" is the value of a function, not zero."""
        given = self._tokens[self._at : self._at + 3]
        if [token.text for token in given[::2]] != ["(", ")"] or given[1].kind != "number":
            return ""
        self._at += 3
        return f"({given[1].text})"

    def _subscript(self) -> str:
        if not self._take_if("{"):
            return self._take().text
        parts = []
        while not self._take_if("}"):
            parts.append(self._take().text)
        return "".join(parts)

    def _function(self, name: str) -> Tree:
        base = self._exponent() if self._take_if("_") else None
        power = self._exponent() if self._take_if("^") else None
        if base is not None and name not in ("log", "ln", "lg"):
            raise ExpressionError(f"{name} has no base")
        if power == _MINUS_ONE and name in _INVERSE:
            name, power = _INVERSE[name], None
        before, self._trigonometric = self._trigonometric, name in _TRIGONOMETRIC
        if self._next_is("symbol", "(") or self._next_is("symbol", "{") or self._next_is("symbol", "["):
            argument = self._postfix(self._until(_CLOSED_BY[self._take().text]))
        else:
            argument = self._signed(lambda: self._implicit_product(in_argument=True))
        self._trigonometric = before
        tree = ("call", name, argument) if base is None else ("/", ("call", "ln", argument), ("call", "ln", base))
        return tree if power is None else ("^", tree, power)

    def _command(self, name: str) -> Tree:
        if name == "pi":
            return ("constant", "pi")
        if name in ("frac", "binom"):
            top, bottom = self._argument(), self._argument()
            return ("/" if name == "frac" else "binom", top, bottom)
        if name == "sqrt":
            root = self._until("]") if self._take_if("[") else ("number", Fraction(2))
            return ("root", self._until(")") if self._take_if("(") else self._argument(), root)
        if name in _ENCLOSED:
            closing, operation = _ENCLOSED[name]
            inside = self.sum()
            self._expect(closing, "command")
            return (operation, inside)
        raise ExpressionError(f"\\{name} is not understood")

    def _argument(self) -> Tree:
        """A group in braces, or one token; of a number, TeX takes only its first digit."""
        if self._take_if("{"):
            return self._until("}")
        token = self.next
        if token is not None and token.kind == "number" and len(token.text) > 1:
            if not token.text.isdigit():
                raise ExpressionError("a decimal needs braces here")
            self._tokens[self._at] = Token("number", token.text[1:])
            return ("number", Fraction(int(token.text[0])))
        return self._atom()


def _is_integer(tree: Tree) -> bool:
    return tree[0] == "number" and tree[1].denominator == 1


def _is_proper(tree: Tree) -> bool:
    return tree[0] == "/" and _is_integer(tree[1]) and _is_integer(tree[2]) and tree[1][1] < tree[2][1]


def _number(text: str) -> Fraction:
    if "\\" in text:
        whole, _, rest = text.partition(".")
        fixed, _, repeat = rest.partition("\\overline{")
        repeat = repeat.rstrip("}")
        scale = 10 ** len(fixed)
        return Fraction(int((whole + fixed) or "0"), scale) + Fraction(int(repeat), (10 ** len(repeat) - 1) * scale)
    return Fraction(text.rstrip(".") or "0")


def variables(tree: Tree) -> frozenset[str]:
    """The names of the variables of an expression."""
    if tree[0] == "variable":
        return frozenset([tree[1]])
    return frozenset().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))
