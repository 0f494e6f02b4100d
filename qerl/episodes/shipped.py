"""The tool and the environment that ship with qerl.

`calculate` is arithmetic on numbers, with + - * / and brackets; nothing else of Python is evaluated. In the word game
the model guesses a word of the row's list, and hears whether the answer comes before or after it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 200  # characters
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / and brackets, such as "(3 + 4) * 2"

    Returns:
        The result.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.6g}"
    except SyntaxError:
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    except (ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, + - * / and brackets can be computed")


class WordGame:
    """The reward is 1 for the word and 0 at the end of the turns; a guess that is not in the list earns nothing."""

    def reset(self, example: Mapping[str, Any]) -> None:
        """The row's question lists the words, and its answer is the one to find."""
        self._secret = example["answer"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take a guess; returns (hint, reward, done)."""
        guess = action.strip().rstrip(".").lower()
        if guess == self._secret:
            return "", 1.0, True
        return ("before" if self._secret < guess else "after"), 0.0, False
