"""Values of a RunConfig that are fine alone and impossible together, one rule each.

A rule takes the configuration and raises Conflict, which names the keys, says why they cannot stand together, and
what to write instead. Rules run in the order of RULES; the first that fails is the one that is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qerl.config import RunConfig


class Conflict(ValueError):
    """An impossible combination. `keys` are dotted; the first one's line is where the error points."""

    def __init__(self, keys: str | tuple[str, ...], why: str, write: str) -> None:
        self.keys = (keys,) if isinstance(keys, str) else keys
        super().__init__(f"{why}; write {write}")


def unused(config: RunConfig) -> None: ...


RULES = ()
