"""Many instances of an environment, one in each episode; every call runs in a thread of its own.

A host answers requests, which are mappings, by mappings of plain values, in the order in which calls end. So it can
stand in this process or behind a pipe (qerl/episodes/worker.py) alike.

    {"id": 7, "do": "reset", "episode": 3, "row": {...}, "seed": 1}     {"id": 7, "messages": [...], ...}
    {"id": 8, "do": "step", "episode": 3, "action": Action}             {"id": 8, "messages": [...], "done": false, ...}
    {"id": 9, "do": "end", "episode": 3}                                {"id": 9, "reward": 1.0}
    {"id": 10, "do": "drop", "episode": 3}                              (none)

Each episode gets an instance of its own, which a step that says that it is done ends as well.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qerl.base.own.returned import one_line
from qerl.episodes.driven import BadEnvironmentError, Driven, checked
from qerl.episodes.values import Action, Reply

Answer = dict[str, Any]


class Host:
    """Makes environments by `make`; `send` takes the answers and is called from several threads, one at a time."""

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
            answer = {"raised": self._text(request["do"], error)}
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
        return Reply(**{**_shallow(reply), "reward": reply.reward + environment.end()})

    def _text(self, did: str, error: BaseException) -> str:
        if isinstance(error, BadEnvironmentError):
            return f"{did} {one_line(error)}"
        said = one_line(error)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._file]
        where = f" ({Path(self._file).name}, line {frames[-1].lineno})" if frames else ""
        return f"{did} raised {type(error).__name__}{f': {said}' if said else ''}{where}"


def _shallow(reply: Reply) -> dict[str, Any]:
    return {name: getattr(reply, name) for name in reply.__dataclass_fields__}
