"""How a user's function is called with columns, in a process of its own or in the one that gave it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qerl.base.own.returned import numbers


class Caller:
    """A function, and the event loop that its coroutines share.

    `index` is the completion with which the function was called alone; None if it takes all of them at once. `alone`
    says which: a function that names `completion`, and not `completions`, takes one at a time.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError or ValueError for a callable whose parameters cannot be known."""
        self.parameters = [*inspect.signature(function).parameters.values()]
        self.alone = {"completion", "completions"} & {p.name for p in self.parameters} == {"completion"}
        self.index: int | None = None
        self._function = function
        self._runner: asyncio.Runner | None = None

    def call(self, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any], expected: int) -> list[float]:
        """`expected` numbers. Raises ReturnedError for what it returned, and whatever the function raises."""
        self.index = None
        returned = self._one_by_one(columns, fixed) if self.alone else self._called(expected, **columns, **fixed)
        return numbers(returned, expected)

    def close(self) -> None:
        """End the event loop; the next coroutine begins another one."""
        with contextlib.suppress(BaseException):
            self._runner.close()
        self._runner = None

    def _called(self, expected: int, /, **arguments: Any) -> Any:
        """What the function returns, awaited if it has to be."""
        returned = self._function(**arguments)
        if inspect.isawaitable(returned):
            returned = self._run(_awaited(returned))
        if isinstance(returned, AsyncIterator):
            returned = self._run(_listed(returned, expected))
        return returned

    def _one_by_one(self, columns: Mapping[str, list[Any]], fixed: Mapping[str, Any]) -> list[Any]:
        """What the function returns for each completion. An error says at which one it was."""
        names = ["completion" if name == "completions" else name for name in columns]
        returned = []
        for index, row in enumerate(zip(*columns.values(), strict=True)):
            self.index = index
            returned.append(self._called(1, **dict(zip(names, row, strict=True)), **fixed))
        return returned

    def _run(self, coroutine: Any) -> Any:
        """The result of a coroutine; where a loop runs in this thread already, as in a notebook, in another thread."""
        self._runner = self._runner or asyncio.Runner()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(coroutine)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._runner.run, coroutine).result()


async def _awaited(returned: Any) -> Any:
    return await returned


async def _listed(returned: AsyncIterator, expected: int) -> list[Any]:
    values = []
    async for value in returned:
        values.append(value)
        if len(values) > expected:
            break
    return values


def seed_all(seed: int) -> None:
    """Make what a function draws at random the same when a run is resumed and grades the same completions."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
