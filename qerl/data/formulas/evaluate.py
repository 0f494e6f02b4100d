"""The value of an expression (qerl/data/formulas/expression.py) where its variables have given values."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from qerl.data.formulas.expression import Tree
from qerl.data.formulas.tokens import ExpressionError

DIGITS = 40
_MAX_BITS = 20_000  # of an exact power; larger ones are computed with 40 digits
_MAX_EXPONENT = 10_000
_MAX_FACTORIAL = 500
_RELATIVE, _FLOOR = 1e-26, 1e-34

Value = Any  # Fraction, or mpmath's mpf and mpc


def evaluate(tree: Tree, point: Mapping[str, Fraction]) -> Value:
    """The value at `point`: a Fraction where the operations allow it, else a number of mpmath with 40 digits.

    Raises ExpressionError if there is no finite value, or if it would be too large to compute.
    """
    try:
        value = _value(tree, point)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ExpressionError(f"there is no value: {error}") from error
    if not isinstance(value, Fraction) and not _mp().isfinite(value):
        raise ExpressionError("the value is not finite")
    return value


_of_thread = threading.local()


def _mp() -> Any:
    """mpmath's functions with 40 digits: one context per thread, since they change its precision while they work."""
    if not hasattr(_of_thread, "context"):
        from mpmath import MPContext

        _of_thread.context = MPContext()
        _of_thread.context.dps = DIGITS
    return _of_thread.context


def is_zero(value: Value) -> bool:
    """Whether a value is zero but for rounding."""
    return value == 0 if isinstance(value, Fraction) else bool(abs(value) < _FLOOR)


def ratio(one: Value, other: Value) -> Value:
    """One value divided by another, which is not zero."""
    return _divide(one, other)


def close(one: Value, other: Value) -> bool:
    """Whether two values are equal: fractions exactly, others but for rounding in the last third of their digits."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    distance, size = _distance(one, other)
    return bool(distance <= max(_RELATIVE * size, _FLOOR))


def close_rounded(one: Value, other: Value) -> bool:
    """Whether a decimal may stand for the other value: they agree to six decimal places, and to 5 digits."""
    distance, size = _distance(one, other)
    return bool(distance <= 5e-7 and distance <= 1e-5 * size)


def _distance(one: Value, other: Value) -> tuple[Value, Value]:
    one, other = _inexact(one), _inexact(other)
    return abs(one - other), max(abs(one), abs(other))


def as_real(value: Value) -> Value | None:
    """A value without an imaginary part beyond rounding, as a real number; None if it has one."""
    if isinstance(value, Fraction) or not hasattr(value, "imag"):
        return value
    return value.real if abs(value.imag) <= max(abs(value) * 1e-30, _FLOOR) else None


def _value(tree: Tree, point: Mapping[str, Fraction]) -> Value:
    operation = tree[0]
    if operation == "number":
        return tree[1]
    if operation == "variable":
        return point[tree[1]]
    if operation == "constant":
        return _constant(tree[1])
    if operation == "call":
        return _call(tree[1], _inexact(_value(tree[2], point)))
    operands = [_value(part, point) for part in tree[1:]]
    return _OPERATIONS[operation](*operands)


def _inexact(value: Value) -> Value:
    return _mp().mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _constant(name: str) -> Value:
    return {"pi": lambda: +_mp().pi, "e": lambda: +_mp().e, "i": lambda: _mp().mpc(0, 1)}[name]()


def _both(one: Value, other: Value) -> tuple[Value, Value]:
    """Two values of which both are exact, or neither."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one, other
    return _inexact(one), _inexact(other)


def _add(one: Value, other: Value) -> Value:
    one, other = _both(one, other)
    return one + other


def _multiply(one: Value, other: Value) -> Value:
    one, other = _both(one, other)
    return one * other


def _divide(one: Value, other: Value) -> Value:
    one, other = _both(one, other)
    return one / other


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        power = int(exponent)
        if isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(power) * bits <= _MAX_BITS:
                return base**power
        if abs(power) > _MAX_EXPONENT:
            raise ExpressionError("the power is too large")
        return _inexact(base) ** power
    base, exponent = _inexact(base), _inexact(exponent)
    if abs(exponent) > _MAX_EXPONENT:
        raise ExpressionError("the power is too large")
    return base**exponent


def _root(radicand: Value, degree: Value) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= 100:
        return _power(radicand, _divide(Fraction(1), degree))
    if isinstance(radicand, Fraction) and radicand < 0 and degree % 2:
        return -_root(-radicand, degree)
    if isinstance(radicand, Fraction) and radicand >= 0 and degree == 2:
        top, bottom = math.isqrt(radicand.numerator), math.isqrt(radicand.denominator)
        if (top**2, bottom**2) == (radicand.numerator, radicand.denominator):
            return Fraction(top, bottom)
    return _mp().root(_inexact(radicand), int(degree))


def _factorial(value: Value) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _MAX_FACTORIAL:
        return Fraction(math.factorial(int(value)))
    if abs(value) > _MAX_FACTORIAL:
        raise ExpressionError("the factorial is too large")
    return _mp().gamma(_inexact(value) + 1)


def _binomial(n: Value, k: Value) -> Value:
    if all(isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= _MAX_FACTORIAL for x in (n, k)):
        return Fraction(math.comb(int(n), int(k)))
    return _divide(_factorial(n), _multiply(_factorial(k), _factorial(_add(n, -k))))


def _whole(value: Value, up: bool) -> Value:
    if isinstance(value, Fraction):
        return Fraction(math.ceil(value) if up else math.floor(value))
    return _mp().ceil(value) if up else _mp().floor(value)


_OPERATIONS = {
    "+": _add,
    "-": lambda one, other: _add(one, -other),
    "*": _multiply,
    "/": _divide,
    "^": _power,
    "neg": lambda value: -value,
    "root": _root,
    "abs": abs,
    "!": _factorial,
    "binom": _binomial,
    "floor": lambda value: _whole(value, up=False),
    "ceil": lambda value: _whole(value, up=True),
    "degree": lambda value: _multiply(value, _constant("pi") / 180),
}


def _call(name: str, value: Value) -> Value:
    if name in ("sinh", "cosh", "tanh", "coth", "sech", "csch", "exp") and abs(value) > _MAX_EXPONENT:
        raise ExpressionError("the argument is too large")
    plain = {
        "ln": _mp().log, "log": _mp().log, "lg": _mp().log10, "arcsin": _mp().asin, "arccos": _mp().acos,
        "arctan": _mp().atan, "arcsec": _mp().asec, "arccsc": _mp().acsc, "arccot": _mp().acot,
    }  # fmt: skip
    return plain.get(name, getattr(_mp(), name, None))(value)
