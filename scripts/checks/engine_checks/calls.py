"""Calls that report completions as they end, and calls that end when there is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_checks.compare import mismatch, same
from engine_checks.context import Context
from qerl.engine.interface import Completion, Request, SamplingParams, Source, joined

TOLD_LENGTHS = (40, 3, 24, 9)
LENGTHS = (40, 3, 24, 9, 200, 5)


class UntilEnough(Source):
    """Two requests at first and another wherever one ends, until `wanted` have ended; what was left begins at once."""

    def __init__(self, prompts: Sequence[Sequence[int]], wanted: int, left: dict[int, Completion]) -> None:
        self.done: dict[int, Completion] = {}
        self._wanted, self._ended, self._left = wanted, 0, left
        first = [index for index in range(len(prompts)) if index in left]
        self._waiting = [self._request(index, prompts[index]) for index in first or range(len(prompts))]
        self._room = len(first) or 2

    def _request(self, index: int, prompt: Sequence[int]) -> Request:
        begun = self._left[index].token_ids if index in self._left else []
        sampling = replace(SamplingParams(LENGTHS[index]), max_new_tokens=LENGTHS[index] - len(begun))
        return Request(index, [*prompt, *begun], sampling, index)

    def begin(self, wait: bool, together: bool) -> list[Request] | None:
        if self._ended >= self._wanted:
            return None
        given, self._waiting = self._waiting[: self._room], self._waiting[self._room :]
        self._room -= len(given)
        return given

    def ended(self, indices: Sequence[int]) -> bool:
        self._ended += len(indices)
        self._room += len(indices)
        return self._ended >= self._wanted or bool(self._waiting)

    def finished(self, index: int, completion: Completion) -> None:
        self.done[index] = joined(self._left[index], completion) if index in self._left else completion


def carried_over(context: Context) -> dict:
    """Six completions of 3 to 200 tokens, two at a time, in calls that end when three have ended."""
    engine, prompts = context.engine, context.prompts[: len(LENGTHS)]
    plain = engine.generate(prompts[:4], SamplingParams(16), seed=1)
    first = UntilEnough(prompts, 3, {})
    left = engine.run(first, seed=1)
    unfinished = engine.llm.llm_engine.get_num_unfinished_requests()
    engine.sleep()
    engine.wake()
    second = UntilEnough(prompts, len(left), left)
    rest = engine.run(second, seed=2)
    done = first.done | second.done
    indices = sorted(done)
    scored = engine.score([prompts[index] for index in indices], [done[index].token_ids for index in indices])
    return {
        "ended_first": sorted(first.done),
        "left": {index: len(part.token_ids) for index, part in left.items()},
        "left_reasons": sorted({part.finish_reason for part in left.values()}),
        "unfinished": unfinished,
        "rest": len(rest),
        "lengths": {index: len(done[index].token_ids) for index in indices},
        "begins_as_before": all(
            done[index].token_ids[: len(part.token_ids)] == part.token_ids for index, part in left.items()
        ),
        "score": mismatch([done[index].logprobs for index in indices], scored),
        "same_afterwards": same(plain, engine.generate(prompts[:4], SamplingParams(16), seed=1)),
    }


class _RefusedError(Exception):
    pass


def told_of_while(context: Context) -> dict:
    """Completions reported while others are still decoded, the same call without reports, and a caller that raises."""
    engine, prompts = context.engine, context.prompts[: len(TOLD_LENGTHS)]
    sampling = [SamplingParams(length, temperature=0.0) for length in TOLD_LENGTHS]
    plain = engine.generate(prompts, sampling, seed=1)
    told: list[tuple[int, Completion, int]] = []
    done = engine.generate(
        prompts, sampling, seed=1, finished=lambda index, completion: told.append((index, completion, _left(engine)))
    )
    scored = engine.score(prompts, [completion.token_ids for completion in done])
    raised = _raising(context, sampling)
    return {
        "lengths": [len(completion.token_ids) for completion in done],
        "order": [index for index, *_ in told],
        "left": [left for *_, left in told],
        "told_is_returned": all(completion is done[index] for index, completion, _ in told),
        "same": same(plain, done),
        "score": mismatch([completion.logprobs for completion in done], scored),
        "raising": raised,
        "same_afterwards": same(plain, engine.generate(prompts, sampling, seed=1)),
    }


def _raising(context: Context, sampling: list[SamplingParams]) -> dict:
    """A caller that raises when the first completion has ended, and the results and scores of the next call."""
    engine, prompts = context.engine, context.prompts[: len(sampling)]

    def refuse(index: int, completion: Completion) -> None:
        raise _RefusedError

    try:
        engine.generate(prompts, sampling, seed=1, finished=refuse)
        raised = False
    except _RefusedError:
        raised = True
    left = _left(engine)
    told: list[int] = []
    after = engine.generate(prompts[1:3], sampling[1:3], seed=1, finished=lambda index, completion: told.append(index))
    scored = engine.score(prompts[1:3], [completion.token_ids for completion in after])
    return {
        "raised": raised,
        "left": left,
        "lengths_after": [len(completion.token_ids) for completion in after],
        "told_after": told,
        "score": mismatch([completion.logprobs for completion in after], scored),
    }


def _left(engine: Any) -> int:
    return engine.llm.llm_engine.get_num_unfinished_requests()
