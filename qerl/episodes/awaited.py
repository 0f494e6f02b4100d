"""The value of a user's coroutine, on one event loop that the episodes of a process share.

Libraries keep locks and connections for as long as the process lives, and these work on the loop that they were first
used on. With a loop for each call the second of two episodes waited forever (verifiers 0.4), and a client opened in
`reset` could not be used in `step`. A coroutine that blocks holds up the others of its loop; those that it keeps from
starting get loops of their own.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from typing import Any

PATIENCE_S = 1.0  # after which a shared loop that starts nothing counts as blocked

_starting = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def awaited(returned: Any) -> Any:
    """What `returned` ends with if it can be awaited, and `returned` as it is if not. Raises what it raised."""
    if not inspect.isawaitable(returned):
        return returned
    began, claim = threading.Event(), threading.Lock()
    future = asyncio.run_coroutine_threadsafe(_on_shared_loop(returned, began, claim), _shared_loop())
    if not began.wait(PATIENCE_S) and claim.acquire(blocking=False):
        return asyncio.run(_value(returned))
    value, error = future.result()
    if error is not None:
        raise error
    return value


async def _on_shared_loop(
    returned: Awaitable[Any], began: threading.Event, claim: threading.Lock
) -> tuple[Any, BaseException | None]:
    """Its value or what it raised, unless another loop has claimed it.

    What it raised is returned because a SystemExit that leaves a task would end the loop for all episodes.
    """
    if not claim.acquire(blocking=False):
        return None, None
    began.set()
    try:
        return await returned, None
    except BaseException as error:
        return None, error


async def _value(returned: Awaitable[Any]) -> Any:
    return await returned


def _shared_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="coroutines", daemon=True).start()
    return _loop
