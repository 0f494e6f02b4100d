"""The process in which environments and tools of the user's own run; qerl/episodes/runner.py starts it.

Its first request is the source to load, and all others are those of a host (qerl/episodes/runner.py).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

from qerl.base.isolate import one_line
from qerl.episodes.build import UnfitError, build
from qerl.episodes.runner import Host


def main(descriptor: int) -> None:
    """Answer requests until the other end is closed; then end, with all that was started here."""
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)

    def send(answer: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(answer, default=str).encode())

    source = pickle.loads(connection.recv_bytes())
    try:
        built = build(source)
    except UnfitError as error:
        send({"unfit": str(error)})
        return
    except BaseException as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        send({"unfit": f"environment {source} cannot be loaded ({why}): correct its file, or name another one"})
        return
    send({"schemas": list(built.schemas), "files": list(built.files)})
    host = Host(built.make, send, built.files[0] if built.files else None)
    try:
        while True:
            host.take(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os.killpg(os.getpgid(0), signal.SIGKILL)
