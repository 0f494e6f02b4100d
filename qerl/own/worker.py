"""The process in which a user's function runs; qerl/own/function.py starts it and says why it is one.

It reads requests (pickled) from a socket and answers each with one JSON object: what a function returned as numbers, or
what went wrong in words. It ends with the process that started it, whatever the function is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from qerl.own.returned import ReturnedError, numbers, one_line


def main(descriptor: int) -> None:
    """Answer requests until the other end is closed."""
    connection, requests = Connection(descriptor), SimpleQueue()
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    worker, pid = _Worker(os.getcwd()), os.getpid()
    while True:
        reply = worker.answer(requests.get())
        if os.getpid() != pid:  # a child that the function forked, and that returned into this loop
            os._exit(0)
        connection.send_bytes(json.dumps(reply).encode())


def _receive(connection: Connection, requests: SimpleQueue) -> None:
    """Read requests beside the function, so that the end of the other process is noticed while it runs."""
    try:
        while True:
            requests.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpgid(0), signal.SIGKILL)  # this process, and what it has started


class _Worker:
    """The function, once it is loaded, and the event loop that its coroutines share."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._function: Callable[..., Any] | None = None
        self._alone = False  # it takes one completion at a time
        self._index: int | None = None  # the completion that it is called with
        self._file: str | None = None
        self._runner: asyncio.Runner | None = None

    def answer(self, request: bytes) -> dict[str, Any]:
        try:
            reply = self._load(**pickle.loads(request)) if self._function is None else self._call(pickle.loads(request))
        except ReturnedError as error:
            reply = {"returned": error.what, "index": error.index}
        except BaseException as error:  # also SystemExit, CancelledError, KeyboardInterrupt
            if not isinstance(error, Exception):
                self._close_loop()
            said = one_line(error)
            what = f"{type(error).__name__}{f': {said}' if said else ''}{self._line(error)}"
            reply = {"raised": what, "index": self._index}
        return reply | self._back_home()

    def _load(self, place: str, attribute: str) -> dict[str, Any]:
        if place.endswith(".py"):
            path = Path(place)
            spec = importlib.util.spec_from_file_location(f"qerl_own_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses and pickle look up the module of a class here
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        self._file = getattr(module, "__file__", None)
        function = getattr(module, attribute, None)
        if not callable(function):
            names = [name for name, _ in inspect.getmembers(module, inspect.isfunction)]
            return {"missing": difflib.get_close_matches(attribute, names, n=1)}
        parameters = inspect.signature(function).parameters.values()
        self._function = function
        self._alone = {"completion", "completions"} & {p.name for p in parameters} == {"completion"}
        files = {getattr(each, "__file__", None) for each in list(sys.modules.values())} - {None, self._file}
        return {
            "parameters": [[p.name, int(p.kind), p.default is not p.empty] for p in parameters],
            "alone": self._alone,
            "files": [*([self._file] if self._file else []), *sorted(files)],
        }

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers, and what the function logged."""
        columns, fixed, expected, logged = request["columns"], request["fixed"], request["expected"], []
        _seed(request["seed"])
        self._index = None
        if request["logs"]:
            fixed["log_metric"] = lambda name, value: logged.append([str(name), float(value)])
        returned = self._one_by_one(columns, fixed) if self._alone else self._called(expected, **columns, **fixed)
        return {"rewards": numbers(returned, expected), "logged": logged}

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
            self._index = index
            returned.append(self._called(1, **dict(zip(names, row, strict=True)), **fixed))
        return returned

    def _run(self, coroutine: Any) -> Any:
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(coroutine)

    def _close_loop(self) -> None:
        with contextlib.suppress(BaseException):
            self._runner.close()
        self._runner = None

    def _line(self, error: BaseException) -> str:
        """Where the user's file raised, as in ` (rewards.py, line 9)`; "" if that is not known."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._file]
        return f" ({Path(self._file).name}, line {frames[-1].lineno})" if frames else ""

    def _back_home(self) -> dict[str, Any]:
        """Undo os.chdir: relative paths of the function mean the same in each call."""
        with contextlib.suppress(OSError):
            if os.getcwd() == self._home:
                return {}
        with contextlib.suppress(OSError):
            os.chdir(self._home)
        return {"moved": True}


async def _awaited(returned: Any) -> Any:
    return await returned


async def _listed(returned: AsyncIterator, expected: int) -> list[Any]:
    values = []
    async for value in returned:
        values.append(value)
        if len(values) > expected:
            break
    return values


def _seed(seed: int) -> None:
    """Make what the function draws at random the same when a run is resumed and grades the same completions."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
