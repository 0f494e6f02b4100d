"""Load a user's own reward function from a file or an importable module, and find the line in it that raised."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from qerl.errors import ConfigError
from qerl.files.nearby import close_to

# What a user's code may raise. An uncaught sys.exit() would end a run as if it had succeeded.
STOPS = (Exception, SystemExit)


def own_function(place: str, attribute: str, name: str, registered: Iterable[str]) -> Callable[..., Any]:
    """The function `attribute` of the file or module `place`. Raises ConfigError, which names the recipe's `name`."""
    module = _load_file(place) if place.endswith(".py") else _load_module(place, name, registered)
    function = getattr(module, attribute, None)
    if not callable(function) or inspect.iscoroutinefunction(function):
        near = difflib.get_close_matches(attribute, _functions(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else " (an async one cannot be used); give one that is there"
        raise ConfigError(f"reward {name!r}: {place} has no function {attribute!r}{hint}")
    return function


def line_that_raised(error: BaseException, caller: str) -> str:
    """Where the user's file raised, as in ` (rewards.py, line 9)`; "" if that is not known.

    The user's file is the first one in the traceback that is not `caller`, the path of qerl's own calling file.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != caller]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _functions(module: Any) -> list[str]:
    members = inspect.getmembers(module, inspect.isfunction)
    return [name for name, function in members if not inspect.iscoroutinefunction(function)]


def _load_file(place: str) -> Any:
    path = Path(place).expanduser()
    if not path.is_file():
        near = close_to(place, files=True)
        raise ConfigError(
            f"reward file {place!r} does not exist here ({Path.cwd()}): "
            f"{f'{near} ' if near else ''}write its path from here, or whole"
        )
    try:
        return _execute(path.resolve(), path.stat().st_mtime_ns)
    except STOPS as error:
        raise ConfigError(f"reward file {place!r} cannot be imported: {type(error).__name__}: {error}") from error


@cache
def _execute(path: Path, _mtime_ns: int) -> Any:
    """The module in a file; it is executed again only after the file has changed."""
    spec = importlib.util.spec_from_file_location(f"qerl_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up the module of a class here
    spec.loader.exec_module(module)
    return module


def _load_module(place: str, name: str, registered: Iterable[str]) -> Any:
    try:
        return importlib.import_module(place)
    except STOPS as error:
        raise ConfigError(
            f"reward {name!r}: module {place!r} cannot be imported ({type(error).__name__}: {error}); write "
            f"package.module:function of an installed package, path/to/file.py:function, or one of "
            f"{', '.join(registered)}"
        ) from error
