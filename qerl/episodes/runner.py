"""Where environments run, seen from the rollout: questions go out, answers come back in the order in which they end.

What ships with qerl, and a server behind a URL, is asked from threads of this process. Code of the user's runs in
processes of its own, for the reasons that qerl/base/own/function.py gives; each hosts its share of the episodes. A call
that does not return in time ends its own episode. Its thread cannot be ended, so its process is, once the rollout is
over.
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from queue import SimpleQueue
from typing import Any, Protocol

from qerl.base.errors import ConfigError
from qerl.base.own.process import OwnFunctionError, Process
from qerl.episodes.build import Source, UnfitError, build
from qerl.episodes.host import Answer, Host
from qerl.episodes.values import Schema

LOAD_S = 120.0  # that loading the user's file may take


class _Place(Protocol):
    schemas: list[Schema]
    files: list[str]

    def take(self, request: dict[str, Any]) -> None: ...

    def replace(self) -> None: ...

    def close(self) -> None: ...


class Runner:
    """The environments of one source. Questions are asked from one thread; `answers` may be waited for in it."""

    def __init__(self, source: Source, processes: int = 1) -> None:
        """Raises ConfigError for what cannot be loaded, or is no environment."""
        self.source = source
        self.answers: SimpleQueue[Answer] = SimpleQueue()
        self._ids = itertools.count()
        self._episodes = itertools.count()
        self._late: set[int] = set()  # places in which a call hangs
        try:
            count = processes if source.own_code else 1
            make = _OwnProcess if source.own_code else _Here
            self._places: list[_Place] = [make(source, self.answers) for _ in range(count)]
        except UnfitError as error:
            raise ConfigError(f"{error}") from error
        self.schemas, self.files = self._places[0].schemas, self._places[0].files

    def episode(self) -> int:
        """The number of a new episode."""
        return next(self._episodes)

    def ask(self, do: str, episode: int, **given: Any) -> int:
        """Begin a call; returns the number that its answer will have as `id`."""
        number = next(self._ids)
        self._places[episode % len(self._places)].take({"id": number, "do": do, "episode": episode, **given})
        return number

    def late(self, episode: int) -> None:
        """A call of this episode did not return in time."""
        self._late.add(episode % len(self._places))

    def settle(self) -> None:
        """End what hangs; called when no episode is open."""
        for place in self._late:
            self._places[place].replace()
        self._late.clear()

    def close(self) -> None:
        """End the processes."""
        for place in self._places:
            place.close()


class _Here:
    """Environments in threads of this process."""

    def __init__(self, source: Source, answers: SimpleQueue[Answer]) -> None:
        built = build(source)
        self.schemas, self.files = list(built.schemas), list(built.files)
        self._host = Host(built.make, answers.put, here=True)

    def take(self, request: dict[str, Any]) -> None:
        self._host.take(request)

    def replace(self) -> None:
        """A thread cannot be ended; it is a daemon, and nobody waits for it."""

    def close(self) -> None:
        pass


class _OwnProcess:
    """Environments in a process, which is started again when it has ended and an episode begins."""

    def __init__(self, source: Source, answers: SimpleQueue[Answer]) -> None:
        self._source, self._answers = source, answers
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._open: set[int] = set()  # questions without an answer
        loaded = self._start()
        self.schemas, self.files = loaded["schemas"], loaded["files"]

    def take(self, request: dict[str, Any]) -> None:
        number, begins = request["id"], request["do"] == "reset"
        with self._lock:
            if self._process is None and not begins:
                self._fail([number], "belongs to a process that has ended")
                return
            if self._process is None:
                try:
                    self._start()
                except UnfitError as error:
                    self._fail([number], f"could not begin: {error}")
                    return
            process = self._process
            if request["do"] != "drop":
                self._open.add(number)
        try:
            process.send(pickle.dumps(request))
        except OSError:  # it has ended, which `_receive` tells to all that wait
            pass
        except Exception as error:  # a row that cannot be pickled
            with self._lock:
                self._open.discard(number)
            self._fail([number], f"cannot be given its row: {error}")

    def replace(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        self.replace()

    def _start(self) -> dict[str, Any]:
        """Start the process and let it load the source. Raises UnfitError."""
        process = Process(f"environment {self._source}", "qerl.episodes.worker")
        try:
            loaded = process.ask(pickle.dumps(self._source), LOAD_S)
        except OwnFunctionError as error:
            process.close()
            raise UnfitError(f"environment {self._source} {error} while it was loaded") from error
        if "unfit" in loaded:
            process.close()
            raise UnfitError(loaded["unfit"])
        self._process = process
        threading.Thread(target=self._receive, args=(process,), name="environment", daemon=True).start()
        return loaded

    def _receive(self, process: Process) -> None:
        try:
            while True:
                answer = json.loads(process.receive())
                with self._lock:
                    self._open.discard(answer["id"])
                self._answers.put(answer)
        except (EOFError, OSError, ValueError):
            pass
        said = process.ending()
        with self._lock:
            if self._process is process:
                self._process = None
            lost, self._open = self._open, set()
        self._fail(sorted(lost), said)

    def _fail(self, numbers: list[int], said: str) -> None:
        for number in numbers:
            self._answers.put({"id": number, "raised": said})
