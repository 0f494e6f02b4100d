"""The value of an expression (qerl/data/formulas/expression.py) where its variables have given values.

Two expressions are equal if their values agree at random points; qerl/data/formulas/equality.py compares them so.
Values are exact fractions as long as the operations allow it, and numbers of 40 digits otherwise. Closeness is
relative, so that e^{-100} differs from e^{-101}; what is zero except for rounding is zero, which more digits show. An
expression of whole numbers that is too large for an exact value has a residue, by which 2^{100000} differs from
2^{100000}-1.
All sizes are bounded (powers, factorials, nesting), so that no expression takes longer than milliseconds.
"""

import math
import operator
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from qerl.data.formulas.expression import ExpressionError, Tree

DIGITS = 40
_MORE_DIGITS = 200  # what constants that agree in 40 are compared with again
_MAX_BITS = 20_000  # of an exact power; larger ones are computed with 40 digits
_MAX_EXPONENT = 10**9
_MAX_FACTORIAL = 2000  # of an exact one
_MAX_FACTORS = 100_000  # of one whose residue is taken
_PRIME = 2**61 - 1
_SMALL = 1e-20  # a value below this may be zero except for rounding

Value = Any  # Fraction, or mpmath's mpf and mpc


def evaluate(tree: Tree, point: Mapping[str, Fraction], digits: int = DIGITS) -> Value:
    """The value at `point`: a Fraction where the operations allow it, else a number of mpmath with that many digits.

    What is zero except for rounding is the Fraction 0. Raises ExpressionError if there is no finite value, or if it
    would be too large to compute.
    """
    try:
        value = _with_digits(tree, point, digits)
        if not isinstance(value, Fraction) and abs(value) < _SMALL:
            finer = _with_digits(tree, point, 2 * digits)
            value = Fraction(0) if abs(finer) <= abs(value) * _SMALL else finer
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ExpressionError(f"there is no value: {error}") from error
    if not isinstance(value, Fraction) and not _mp().isfinite(value):
        raise ExpressionError("the value is not finite")
    return value


def equal_constants(one: Tree, other: Tree) -> bool | None:
    """Whether two expressions without variables are equal; None if one has no value, or none that can be computed."""
    try:
        values = evaluate(one, {}), evaluate(other, {})
        if all(isinstance(value, Fraction) for value in values):
            return values[0] == values[1]
        if None not in (residues := (residue(one), residue(other))):
            return residues[0] == residues[1]
        return close(*values) and close(
            evaluate(one, {}, _MORE_DIGITS), evaluate(other, {}, _MORE_DIGITS), _MORE_DIGITS
        )
    except ExpressionError:
        residues = residue(one), residue(other)
        return None if None in residues else residues[0] == residues[1]


def residue(tree: Tree) -> int | None:
    """The value of an expression of whole numbers modulo a prime of 61 bits; None if it has other parts."""
    try:
        return _residue(tree)
    except (ExpressionError, ValueError):
        return None


def _residue(tree: Tree) -> int:
    operation, *parts = tree
    if operation == "number":
        return parts[0].numerator * pow(parts[0].denominator, -1, _PRIME) % _PRIME
    if operation in ("^", "!", "binom"):
        whole = [evaluate(part, {}) for part in (parts if operation == "binom" else parts[-1:])]
        if any(not isinstance(value, Fraction) or value.denominator != 1 for value in whole):
            raise ExpressionError("not whole")
        n, *chosen = map(int, whole)
        if operation == "^":
            return pow(_residue(parts[0]), n, _PRIME)
        below = [_factorial_residue(k) * _factorial_residue(n - k) for k in chosen]
        return _factorial_residue(n) * pow(math.prod(below), -1, _PRIME) % _PRIME
    values = [_residue(part) for part in parts if operation in ("+", "-", "*", "/", "neg")]
    if not values:
        raise ExpressionError(f"{operation} has no residue")
    if operation == "neg":
        return -values[0] % _PRIME
    one, other = values
    if operation == "/":
        return one * pow(other, -1, _PRIME) % _PRIME
    return {"+": operator.add, "-": operator.sub, "*": operator.mul}[operation](one, other) % _PRIME


def _factorial_residue(n: int) -> int:
    if not 0 <= n <= _MAX_FACTORS:
        raise ExpressionError("the factorial is too large")
    return _product(n - n % 1000 + 1, n, _thousands(n // 1000))


@lru_cache(None)
def _thousands(count: int) -> int:
    """The residue of (1000 count)!."""
    return _product(1000 * count - 999, 1000 * count, _thousands(count - 1)) if count else 1


def _product(first: int, last: int, product: int) -> int:
    for factor in range(first, last + 1):
        product = product * factor % _PRIME
    return product


def _with_digits(tree: Tree, point: Mapping[str, Fraction], digits: int) -> Value:
    with _mp().workdps(digits):
        return _value(tree, point)


_of_thread = threading.local()


def _mp() -> Any:
    """mpmath's functions with 40 digits: one context per thread, since they change its precision while they work."""
    if not hasattr(_of_thread, "context"):
        from mpmath import MPContext

        _of_thread.context = MPContext()
        _of_thread.context.dps = DIGITS
    return _of_thread.context


def close(one: Value, other: Value, digits: int = DIGITS) -> bool:
    """Whether two values are equal: fractions exactly, others up to rounding in the last third of their digits."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    with _mp().workdps(digits):
        distance, size = _distance(one, other)
        return bool(distance <= size * _mp().mpf(10) ** -(digits * 2 // 3))


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
    return value.real if abs(value.imag) <= abs(value) * 1e-30 else None


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


def _exact(operation: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Value]:
    """The operation on two values of which both are exact, or neither."""

    def apply(one: Value, other: Value) -> Value:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return operation(one, other)
        return operation(_inexact(one), _inexact(other))

    return apply


_add, _multiply, ratio = _exact(operator.add), _exact(operator.mul), _exact(operator.truediv)


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
        return _power(radicand, ratio(Fraction(1), degree))
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
    if abs(value) > _MAX_EXPONENT:
        raise ExpressionError("the factorial is too large")
    return _mp().gamma(_inexact(value) + 1)


def _binomial(n: Value, k: Value) -> Value:
    if all(isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= _MAX_FACTORIAL for x in (n, k)):
        return Fraction(math.comb(int(n), int(k)))
    return ratio(_factorial(n), _multiply(_factorial(k), _factorial(_add(n, -k))))


def _whole(value: Value, up: bool) -> Value:
    if isinstance(value, Fraction):
        return Fraction(math.ceil(value) if up else math.floor(value))
    return _mp().ceil(value) if up else _mp().floor(value)


_OPERATIONS = {
    "+": _add,
    "-": _exact(operator.sub),
    "*": _multiply,
    "/": ratio,
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
