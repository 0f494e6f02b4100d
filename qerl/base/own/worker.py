"""The process in which a user's function runs; qerl/base/own/function.py starts it and says why it is one.

It reads requests (pickled) from a socket and answers each with one JSON object: what a function returned as numbers, or
what went wrong in words. It ends with the process that started it, whatever the function is doing.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from qerl.base.own.function import Caller, seed_all
from qerl.base.own.process import ReturnedError, one_line


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
    """The function, once it is loaded."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._caller: Caller | None = None
        self._file: str | None = None

    def answer(self, request: bytes) -> dict[str, Any]:
        try:
            reply = self._load(**pickle.loads(request)) if self._caller is None else self._call(pickle.loads(request))
        except ReturnedError as error:
            reply = {"returned": error.what, "index": error.index}
        except BaseException as error:  # also SystemExit, CancelledError, KeyboardInterrupt
            if not isinstance(error, Exception) and self._caller is not None:
                self._caller.close()
            said = one_line(error)
            what = f"{type(error).__name__}{f': {said}' if said else ''}{self._line(error)}"
            reply = {"raised": what, "index": None if self._caller is None else self._caller.index}
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
        self._caller = Caller(function)
        files = {getattr(each, "__file__", None) for each in list(sys.modules.values())} - {None, self._file}
        return {
            "parameters": [[p.name, int(p.kind), p.default is not p.empty] for p in self._caller.parameters],
            "alone": self._caller.alone,
            "files": [*([self._file] if self._file else []), *sorted(files)],
        }

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers, and what the function logged."""
        columns, fixed, expected, logged = request["columns"], request["fixed"], request["expected"], []
        seed_all(request["seed"])
        if request["logs"]:
            fixed["log_metric"] = lambda name, value: logged.append([str(name), float(value)])
        return {"rewards": self._caller.call(columns, fixed, expected), "logged": logged}

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
