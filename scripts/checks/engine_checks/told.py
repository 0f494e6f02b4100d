"""The engine reports each completion to its caller as soon as it ends: when, in which order, and at what cost."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from engine_checks.compare import mismatch, same
from engine_checks.context import Context
from qerl.engine.interface import Completion, SamplingParams, request_seed
from qerl.engine.vllm import requests

GROUPS, GROUP_SIZE, LONGEST, ROUNDS = 16, 8, 512, 5
LENGTHS = (40, 3, 24, 9)


class _RefusedError(Exception):
    pass


def told_of_while(context: Context) -> dict:
    """Completions reported while others are still decoded, the same call without reports, and a caller that raises."""
    engine, prompts = context.engine, context.prompts[: len(LENGTHS)]
    sampling = [SamplingParams(length, temperature=0.0) for length in LENGTHS]
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


def told(context: Context) -> dict:
    """Seconds of a rollout of 16 x 8 completions of 1 to 512 tokens, in three ways that take turns.

    They are `LLM.generate` itself, the engine, and the engine with reports to a caller.
    """
    engine, rng = context.engine, random.Random(5)
    prompts = [prompt for prompt in context.prompts[:GROUPS] for _ in range(GROUP_SIZE)]
    sampling = [SamplingParams(rng.randint(1, LONGEST)) for _ in prompts]
    ended: list[float] = []
    ways: dict[str, Callable[[], list[Completion]]] = {
        "vllm": lambda: _by_vllm(engine, prompts, sampling),
        "plain": lambda: engine.generate(prompts, sampling, seed=1),
        "told": lambda: engine.generate(prompts, sampling, seed=1, finished=lambda *_: ended.append(time.monotonic())),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    tokens: dict[str, list[int]] = {way: [] for way in ways}
    for turn in range(1 + ROUNDS):  # the first is a warm-up
        ended.clear()
        for way, generate in ways.items():
            started = time.monotonic()
            done = generate()
            if turn:
                seconds[way].append(time.monotonic() - started)
                tokens[way].append(sum(len(completion.token_ids) for completion in done))
    return {
        "seconds": seconds,
        "median_s": {way: statistics.median(values) for way, values in seconds.items()},
        "tokens": tokens,
        "told_s_before_the_last": [round(ended[-1] - moment, 3) for moment in ended[:: len(ended) // 8]],
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


def _by_vllm(engine: Any, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[Completion]:
    """The completions of `LLM.generate` for the same requests, with equally rare garbage collections."""
    ends = engine.end_token_ids
    params = [requests.sampling_params(one, ends, request_seed(1, index)) for index, one in enumerate(sampling)]
    if engine.options.deterministic:
        requests.drop_prefix_cache(engine.llm)
    with requests.rare_collections():
        outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [requests.completion(output.outputs[0]) for output in outputs]


def _left(engine: Any) -> int:
    return engine.llm.llm_engine.get_num_unfinished_requests()
