"""Conversations on an engine that samples one batch at a time."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from qerl.engine.seeds import request_seed

if TYPE_CHECKING:
    from qerl.engine.interface import Conversations, Engine


def converse_in_waves(engine: Engine, conversations: Conversations, seed: int | None) -> None:
    """All prompts of a wave are sampled together, so its turns depend on which others there are: it waits for all."""
    for wave in itertools.count():
        if not (requests := conversations.ready(wait=True, everyone=True)):
            return
        own = request_seed(seed, wave) if wave else seed
        done = engine.generate([one.prompt for one in requests], [one.sampling for one in requests], own)
        for request, completion in zip(requests, done, strict=True):
            conversations.finished(request.index, completion)
