"""Commands whose options are the fields of a dataclass, so that they are written once:

    @dataclass(frozen=True)
    class GradeOptions:
        file: Annotated[Path, typer.Argument(help="...")]
        task: Annotated[str, typer.Option(help="...")] = "gsm8k"

    def grade(options: GradeOptions) -> None: ...

    app.command()(command_of(grade))

`options_named` lets an error of the engine name a command's option: the engine speaks of `rollout.memory`, and
`qerl eval` and `qerl chat` have --memory.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from qerl.base.errors import CAP_GIB, ENGINE, KERNEL, MAX_NEW_TOKENS, MEMORY, Key, QerlError
from qerl.data.option_text import Text

ENGINE_OPTIONS = {  # what every command that opens an engine has
    MEMORY: "--memory",
    CAP_GIB: "--cap-gib",
    KERNEL: "--kernel",
    ENGINE: "--engine",
    MAX_NEW_TOKENS: "--max-new-tokens",
}

Gpu = Annotated[
    int | None,
    typer.Option(min=0, help="Card of this machine, as `qerl doctor` counts; default: that with the most free memory."),
]  # what every command that uses one card has


@contextmanager
def options_named(options: Mapping[Key, str]) -> Iterator[None]:
    """Within it, errors and log lines show `options` in place of the keys that they name."""

    def show(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(part.shown(options) if isinstance(part, Key) else part for part in record.args)
        return True

    handlers = logging.getLogger().handlers[:]
    for handler in handlers:
        handler.addFilter(show)
    try:
        yield
    except QerlError as error:
        error.options = options
        raise
    finally:
        for handler in handlers:
            handler.removeFilter(show)


def command_of(function: Callable[..., None], **fixed: object) -> Callable[..., None]:
    """The command, for typer, of a function: a parameter that is a dataclass stands for its fields.

    Of a dataclass, fields that carry typer's marks are options; one of type tuple[X, ...] can be given several times.
    `fixed` gives values for fields that are not to be options.
    """
    signature = inspect.signature(function, eval_str=True)

    def command(**typed: Any) -> None:
        arguments = {}
        for name, parameter in signature.parameters.items():
            kind = parameter.annotation
            arguments[name] = kind(**fixed, **_values(kind, typed)) if is_dataclass(kind) else typed[name]
        function(**arguments)

    parameters = [option for each in signature.parameters.values() for option in _options(each, fixed)]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def _options(parameter: inspect.Parameter, fixed: Mapping[str, object]) -> Iterator[inspect.Parameter]:
    """What typer is to offer for a parameter of the function."""
    if not is_dataclass(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    types = get_type_hints(parameter.annotation, include_extras=True)
    for field in fields(parameter.annotation):
        kind, *marks = get_args(types[field.name]) or [types[field.name]]
        shown = [mark for mark in marks if isinstance(mark, (OptionInfo, ArgumentInfo))]
        if field.name in fixed or not shown:
            continue
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        if _text(marks) is not None:
            kind, default = (str, default) if field.default is MISSING else (str | None, None)
        elif get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]] | None, None
        annotation = Annotated[(kind, *shown)]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _values(kind: Any, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass for what was typed; what was not typed keeps its default."""
    types, values = get_type_hints(kind, include_extras=True), {}
    for field in fields(kind):
        value = typed.get(field.name)
        if value is None:
            continue
        text = _text(get_args(types[field.name])[1:])
        values[field.name] = tuple(value) if isinstance(value, list) else value if text is None else text.read(value)
    return values


def _text(marks: Any) -> Text | None:
    return next((mark for mark in marks if isinstance(mark, Text)), None)
