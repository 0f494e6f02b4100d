"""Conversations, and completions that begin while others end, on an engine that samples one batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qerl.engine.interface import Completion, Request
from qerl.engine.recorded import extended
from qerl.engine.seeds import request_seed

if TYPE_CHECKING:
    from qerl.engine.interface import Conversations, Engine, Supply

Wave = Callable[[Sequence[Request], int | None, Callable[[list[int]], bool]], list[Completion]]


def converse_in_waves(engine: Engine, conversations: Conversations, seed: int | None) -> None:
    """All prompts of a wave are sampled together, so its turns depend on which others there are: it waits for all."""
    for wave in itertools.count():
        if not (requests := conversations.ready(wait=True, everyone=True)):
            return
        own = request_seed(seed, wave) if wave else seed
        done = engine.generate([one.prompt for one in requests], [one.sampling for one in requests], own)
        for request, completion in zip(requests, done, strict=True):
            conversations.finished(request.index, completion)


def sample_in_waves(wave: Wave, supply: Supply, seed: int | None) -> dict[int, Completion]:
    """`Engine.sample_from`: a wave ends when something else may begin, and what it leaves goes on in the next one.

    `wave(requests, seed, ended)` samples until `ended`, told of rows as they end, is True. The first wave draws what
    `Engine.generate` draws for the same prompts.
    """
    running: dict[int, Request] = {}
    so_far: dict[int, Completion] = {}
    while (new := supply.begin()) is not None and (running or new):
        running |= {request.index: request for request in new}
        so_far |= {request.index: Completion([], [], "unfinished") for request in new}
        requests = [_continued(request, so_far[index]) for index, request in running.items()]
        order, stream = list(running), new[0].stream if new else 0
        own = request_seed(seed, stream) if stream else seed
        done = wave(requests, own, lambda rows, order=order: supply.ended([order[row] for row in rows]))
        for index, completion in zip(order, done, strict=True):
            whole = so_far[index] = joined(so_far[index], completion)
            if whole.finish_reason != "unfinished":
                del running[index]
                supply.finished(index, so_far.pop(index))
    return so_far


def joined(begun: Completion, rest: Completion) -> Completion:
    """A completion of two parts."""
    return Completion(
        begun.token_ids + rest.token_ids,
        begun.logprobs + rest.logprobs,
        rest.finish_reason,
        extended(begun.experts, rest.experts),
    )


def _continued(request: Request, begun: Completion) -> Request:
    """What is left to sample of a request."""
    left = request.sampling.max_new_tokens - len(begun.token_ids)
    sampling = replace(request.sampling, max_new_tokens=left)
    return replace(request, prompt=[*request.prompt, *begun.token_ids], sampling=sampling)
