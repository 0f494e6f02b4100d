"""Where environments run: questions go out, and answers come back in the order in which the calls end.

What ships with qerl, and a server behind a URL, is asked from threads of this process. Code of the user's runs in
processes of its own (`main` runs there), for the reasons that qerl/base/own_function.py gives; each hosts its share of
the episodes. A call that does not return in time ends its own episode. Its thread cannot be ended, so its process is,
once the rollout is over.
"""

import itertools
import json
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from qerl.base.errors import ConfigError
from qerl.base.isolate import OwnFunctionError, Process, one_line, raised
from qerl.base.own_function import loaded_files, users_own
from qerl.episodes.build import Source, build
from qerl.episodes.driven import Action, BadEnvironmentError, Driven, Reply, checked

Answer = dict[str, Any]


class Host:
    """Makes environments by `make`; `send` takes the answers and is called from several threads, one at a time.

    A host has an instance for each episode, and every call runs in a thread of its own. It answers requests, which are
    mappings, by mappings of plain values. So it can stand in this process or behind a pipe.

        {"id": 7, "do": "reset", "episode": 3, "row": {...}, "seed": 1}  ->  {"id": 7, "messages": [...], ...}
        {"id": 8, "do": "step", "episode": 3, "action": Action}          ->  {"id": 8, "messages": [...], "done": false}
        {"id": 9, "do": "end", "episode": 3}                             ->  {"id": 9, "reward": 1.0}
        {"id": 10, "do": "drop", "episode": 3}                           ->  (none)

    An episode's instance also ends with a step that says that it is done.
    """

    def __init__(
        self, make: Callable[[], Driven], send: Callable[[Answer], None], file: str | None = None, here: bool = False
    ) -> None:
        """`file` is the user's, whose lines are named in errors. `here` adds to each answer the object itself."""
        self._make, self._send, self._file, self._here = make, send, file, here
        self._lock = threading.Lock()
        self._instances: dict[int, Driven] = {}

    def take(self, request: Mapping[str, Any]) -> None:
        """Begin to answer a request. The thread is a daemon: one that never returns does not keep the process."""
        if request["do"] == "drop":
            self._leave(request["episode"])
            return
        threading.Thread(target=self._answer, args=(request,), name="environment", daemon=True).start()

    def _answer(self, request: Mapping[str, Any]) -> None:
        instance = self._instances.get(request["episode"])
        try:
            if request["do"] == "reset":
                instance = self._instances[request["episode"]] = self._make()
            answer = asdict(checked(self._do(request["episode"], request)))
        except BaseException as error:  # also SystemExit
            self._leave(request["episode"])
            bad = isinstance(error, BadEnvironmentError)
            answer = {"raised": f"{request['do']} {one_line(error) if bad else f'raised {raised(error, self._file)}'}"}
        if self._here:
            answer["environment"] = getattr(instance, "environment", None)
        with self._lock:
            self._send({"id": request["id"], **answer})

    def _leave(self, episode: int) -> None:
        """Drop an episode, of which nothing more is asked."""
        instance = self._instances.pop(episode, None)
        if hasattr(instance, "abandon"):
            instance.abandon()

    def _do(self, episode: int, request: Mapping[str, Any]) -> Reply:
        environment = self._instances[episode]
        if request["do"] == "reset":
            return environment.reset(request["row"], request["seed"])
        if request["do"] == "end":
            self._instances.pop(episode)
            return Reply(reward=environment.end(), done=True)
        action: Action = request["action"]
        reply = environment.step(action)
        if not reply.done:
            return reply
        self._instances.pop(episode)
        return replace(reply, reward=reply.reward + environment.end())


LOAD_S = 120.0  # that loading the user's file may take


class Runner:
    """The environments of one source. Questions are asked from one thread; `answers` may be waited for in it."""

    def __init__(self, source: Source, processes: int = 1) -> None:
        """Raises ConfigError for what cannot be loaded, or is not an environment."""
        self.source = source
        self.answers: SimpleQueue[Answer] = SimpleQueue()
        self._ids = itertools.count()
        self._episodes = itertools.count()
        self._late: set[int] = set()  # places in which a call hangs
        count, make = (processes, _OwnProcess) if source.own_code else (1, _Here)
        self._places = [make(source, self.answers) for _ in range(count)]
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
                except ConfigError as error:
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
        """Start the process and let it load the source. Raises ConfigError."""
        process = Process(f"environment {self._source}", __name__)
        try:
            loaded = process.ask(pickle.dumps(self._source), LOAD_S)
        except OwnFunctionError as error:
            process.close()
            raise ConfigError(f"environment {self._source} {error} while it was loaded") from error
        if "unfit" in loaded:
            process.close()
            raise ConfigError(loaded["unfit"])
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


def main(descriptor: int) -> None:
    """Host the source that the first request names: answer requests until the other end is closed. Then end, with all
    that was started here."""
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)

    def send(answer: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(answer, default=str).encode())

    source = pickle.loads(connection.recv_bytes())
    try:
        built = build(source)
    except ConfigError as error:
        send({"unfit": str(error)})
        return
    except BaseException as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        send({"unfit": f"environment {source} cannot be loaded ({why}): correct its file, or name another one"})
        return
    files = dict.fromkeys([*built.files, *map(str, users_own(loaded_files()))])  # with what they import
    send({"schemas": list(built.schemas), "files": list(files)})
    host = Host(built.make, send, built.files[0] if built.files else None)
    try:
        while True:
            host.take(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os.killpg(os.getpgid(0), signal.SIGKILL)
