"""What a recipe or a caller names -> what makes an environment for each episode, and the schemas of its tools.

    calculator, word_game        ship with qerl: arithmetic on numbers, nothing else of Python; guesses of a row's word
    file.py:Name                 a class, or a function that returns an object; also package.module:Name
    file.py:function             with an argument `base_url`: a program that asks a model (endpoint.py)
    http://...                   a server (qerl/episodes/remote.py)
    tools                        functions, each named as file.py:name or package.module:name

An object with `reset` and `step` is an environment of the user's own. One with `reset` and no `step` is one as TRL's
`environment_factory` makes it, whose public methods are tools.
"""

import ast
import difflib
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from qerl.base.errors import ConfigError
from qerl.base.isolate import load_module
from qerl.base.program import PYTHON
from qerl.config.data import is_url
from qerl.config.names import ENVIRONMENTS
from qerl.episodes.driven import Driven, Schema, Stepped, Tooled, methods_of
from qerl.episodes.endpoint import Programmed, is_program
from qerl.episodes.remote import Remote


@dataclass(frozen=True)
class Source:
    """What is asked for: an environment by name, plain functions as tools, or both."""

    name: str | None = None
    tools: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own_code(self) -> bool:
        """Whether it runs code of the user's, which then gets a process of its own."""
        named = self.name is not None and self.name not in KNOWN and not is_url(self.name)
        return named or any(tool not in KNOWN for tool in self.tools)

    def __str__(self) -> str:
        return ", ".join([*([self.name] if self.name else []), *self.tools])


@dataclass(frozen=True)
class Built:
    """`make` gives the environment of one episode; `files` hold the user's code, its own first."""

    make: Callable[[], Driven]
    schemas: tuple[Schema, ...]
    files: tuple[str, ...] = ()


LONGEST = 200  # characters of an arithmetic expression
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


# By name: functions are tools, all else makes an environment.
KNOWN: dict[str, Callable[..., Any]] = {"calculator": calculate, "word_game": WordGame}
TOOLS = {"calculator"}


def register(name: str, make: Callable[..., Any], tool: bool = False) -> None:
    """Let recipes of this process name an environment, or a `tool`, that is an object of Python."""
    KNOWN[name] = make
    ENVIRONMENTS.add(name)
    (TOOLS.add if tool else TOOLS.discard)(name)


def build(source: Source) -> Built:
    """Load what the source names and make one environment, which shows what it is. Raises ConfigError."""
    files: list[str] = []
    names = [*source.tools, *([source.name] if source.name in TOOLS else [])]
    functions = [_found(name, files) for name in names]
    name = None if source.name in TOOLS else source.name
    if name is None:
        return Built(lambda: Tooled(functions), tuple(map(schema_of, functions)), tuple(files))
    if is_url(name):
        if functions:
            raise ConfigError(f"environment {name} is a server, which brings its own tools: leave out tools")
        _made(name, partial(Remote, name), source.args)
        return Built(lambda: Remote(name, **source.args), ())
    factory = _found(name, files)
    if is_program(factory):
        if functions:
            raise ConfigError(
                f"environment {name} is a program, whose tools stand in its attribute `tools`: leave out tools"
            )
        return Built(lambda: Programmed(factory, source.args), tuple(getattr(factory, "tools", ())), tuple(files))
    first = _made(name, factory, source.args)
    methods = methods_of(first)
    if callable(getattr(first, "env_response", None)):
        raise ConfigError(
            f"environment {name} is one of verifiers, which samples by itself: write solve(base_url, example), a "
            "function that has it ask that URL and returns its reward (docs/other-environments.md)"
        )
    if not callable(getattr(first, "reset", None)):
        raise ConfigError(f"environment {name} has no reset: write reset(self, example), which begins an episode")
    if callable(getattr(first, "step", None)):
        if functions:
            raise ConfigError(f"environment {name} has a step, which takes the model's turn: leave out tools")
        return Built(lambda: Stepped(_made(name, factory, source.args)), (), tuple(files))
    if not methods and not functions:
        raise ConfigError(
            f"environment {name} has neither step nor a method that could be a tool: write step(self, action), which "
            "returns (observation, reward, done)"
        )
    schemas = tuple(map(schema_of, [*functions, *methods]))
    return Built(lambda: Tooled(functions, _made(name, factory, source.args)), schemas, tuple(files))


def schema_of(function: Callable[..., Any]) -> Schema:
    """The JSON schema of a tool, of its type hints and docstring. Raises ConfigError for a tool without them."""
    from qerl.base.sandbox import template_module

    try:
        return template_module().get_json_schema(function)
    except Exception as error:
        name, why = getattr(function, "__name__", function), " ".join(str(error).split())[:160]
        raise ConfigError(
            f"tool {name} has no schema ({why}): give each argument a type hint and a line in the docstring under Args:"
        ) from error


def _made(name: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    try:
        return factory(**args)
    except TypeError as error:
        given = ", ".join(args) or "none"
        raise ConfigError(
            f"environment {name} cannot be made with args {given} ({error}): set environment.args to what it takes"
        ) from error


def _found(name: str, files: list[str]) -> Callable[..., Any]:
    """The class or function of that name; its module's file is added to `files`."""
    if name in KNOWN:
        return KNOWN[name]
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not attribute.isidentifier():
        raise ConfigError(
            f"{name!r} names no environment and no tool: write {', '.join(KNOWN)}, path/to/file.py:Name, or "
            "package.module:Name"
        )
    if place == PYTHON:
        raise ConfigError(
            f"{name} is an object of the Python program that began the run: go on there, with environment={attribute} "
            f"or tools=[{attribute}], or name it by its file, path/to/file.py:{attribute}"
        )
    module = _module(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, [key for key, one in vars(module).items() if callable(one)], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "give one that is there"
        raise ConfigError(f"{place} has no class or function {attribute!r}: {hint}")
    if getattr(module, "__file__", None):
        files.append(module.__file__)
    return found


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"file {place!r} does not exist here ({Path.cwd()}): write its path from here, or whole")
        there, place = sys.modules.get(f"qerl_own_{path.stem}"), str(path)
        if getattr(there, "__file__", None) == place:
            return there
    return load_module(place)
