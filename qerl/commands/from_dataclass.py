"""A command whose options are the fields of a dataclass, so that they are written once.

@dataclass(frozen=True)
class GradeOptions:
    file: Annotated[Path, typer.Argument(help="...")]
    task: Annotated[str, typer.Option(help="...")] = "gsm8k"

def grade(options: GradeOptions) -> None: ...

app.command()(command_of(grade))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo


@dataclass(frozen=True)
class Text:
    """Marks a field that is typed as text, which `read` turns into its value."""

    read: Callable[[str], Any]


def command_of(function: Callable[[Any], None], **fixed: object) -> Callable[..., None]:
    """The command, for typer, of a function whose only argument is a dataclass.

    Fields that carry typer's marks are its options; `fixed` gives values for fields that are not to be options.
    """
    ((_, parameter),) = inspect.signature(function, eval_str=True).parameters.items()
    options = parameter.annotation
    types = get_type_hints(options, include_extras=True)
    marked = [field for field in fields(options) if field.name not in fixed and _is_option(types[field.name])]
    readers = {field.name: mark.read for field in marked for mark in _marks(types[field.name], Text)}

    def command(**typed: Any) -> None:
        absent = {name for name in readers if typed[name] is None}  # these keep their defaults
        read = {name: readers[name](typed[name]) for name in readers.keys() - absent}
        function(options(**fixed, **{name: value for name, value in typed.items() if name not in absent} | read))

    parameters = [_parameter(field, types[field.name]) for field in marked]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def _marks(annotation: Any, kind: Any) -> list[Any]:
    return [mark for mark in get_args(annotation)[1:] if isinstance(mark, kind)]


def _is_option(annotation: Any) -> bool:
    return bool(_marks(annotation, (OptionInfo, ArgumentInfo)))


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if _marks(annotation, Text):
        annotation = Annotated[(str | None, *_marks(annotation, (OptionInfo, ArgumentInfo)))]
        default = None
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
