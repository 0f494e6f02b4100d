"""A call of vLLM: the requests that it gets and the outputs that come back.

vLLM's `LLM.generate` returns when the last sequence has ended. `run` makes the same requests (`LLM.enqueue`) and the
same steps, and hands on each output as soon as it is complete.

Two things would go wrong in silence. An interrupted call leaves its requests in vLLM's scheduler, and the next call
would return their completions among its own: `run` aborts them. And vLLM only logs it if it keeps its prefix cache:
`drop_prefix_cache` raises.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from qerl.base.errors import EngineError
from qerl.engine.interface import Completion, SamplingParams
from qerl.engine.vllm.exhausted import out_of_memory

T = TypeVar("T")

NEW_OBJECTS = (100_000, 50, 100)  # thresholds of Python's garbage collector, for gc.set_threshold


def run(llm: Any, prompts: Sequence[Sequence[int]], params: Any, take: Callable[[int, Any], T]) -> list[T]:
    """Run `prompts` (token ids) and return what `take(index, output)` gives for each, in the order of the prompts.

    `params` are vLLM's, for all prompts or for each. `take` is called as soon as an output is complete, while vLLM
    still works on the others. Raises EngineError if memory runs out, and whatever `take` raises.
    """
    taken: dict[int, T] = {}
    ended = 0
    with aborted_on_error(llm, len(prompts)), rare_collections():
        indices = dict(zip(enqueued(llm, prompts, params), range(len(prompts)), strict=True))
        for output in _as_they_end(llm.llm_engine):
            ended += 1
            if (index := indices.get(output.request_id)) is not None:
                taken[index] = take(index, output)
    if not ended == len(taken) == len(prompts):
        raise EngineError(f"vLLM returned {ended} completions for {len(prompts)} prompts: open the engine anew")
    return [taken[index] for index in range(len(prompts))]


def converse(
    llm: Any, ready: Callable[[bool], Sequence[tuple[int, Sequence[int], Any]]], take: Callable[[int, Any], object]
) -> None:
    """Run requests that come and go: `ready(wait)` gives (index, token ids, vLLM's parameters) of each that can begin.

    It is asked between vLLM's steps, and with `wait` when vLLM has nothing to do; if it then gives none, all is done.
    `take(index, output)` is called with each output that is complete. Raises what `run` raises.
    """
    indices: dict[str, int] = {}
    engine = llm.llm_engine
    with aborted_on_error(llm, 1), rare_collections():
        while True:
            idle = not engine.has_unfinished_requests()
            new = ready(idle)
            if idle and not new:
                return
            if new:
                names = enqueued(llm, [prompt for _, prompt, _ in new], [params for _, _, params in new])
                indices |= dict(zip(names, (index for index, _, _ in new), strict=True))
            for output in engine.step():
                if output.finished and (index := indices.pop(output.request_id, None)) is not None:
                    take(index, output)


def enqueued(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[str]:
    """The names by which vLLM's outputs call the requests that it now has."""
    names = llm.enqueue([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    # vLLM 0.25.1 calls a request "NUMBER-RANDOM" (or "NUMBER", by an environment variable) and its output "NUMBER".
    return [name.partition("-")[0] for name in names]


@contextmanager
def aborted_on_error(llm: Any, sequences: int) -> Iterator[None]:
    """Take all requests from vLLM if the block raises, Ctrl-C included. Raises EngineError if memory runs out."""
    import torch

    try:
        yield
    except BaseException as error:
        abandoned = list(llm.llm_engine.output_processor.request_states)
        llm.llm_engine.abort_request(abandoned, internal=True)
        if isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory(f"a call of {sequences} sequences", error) from error
        raise


def _as_they_end(engine: Any) -> Iterator[Any]:
    """The outputs of all of vLLM's requests, as they are completed; partial outputs are left out."""
    while engine.has_unfinished_requests():
        yield from (output for output in engine.step() if output.finished)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within the block Python looks for unreachable cycles only after many new objects.

    vLLM's scheduler makes thousands of objects per step, none of them in cycles. With 256 sequences a step takes 7.7 ms
    of CPU time with Python's thresholds and 6.1 ms without any search; the GPU needs 9 ms.
    """
    before = gc.get_threshold()
    gc.set_threshold(*NEW_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def drop_prefix_cache(llm: Any) -> None:
    """Forget keys and values computed with other weights. Raises EngineError if vLLM would go on using them."""
    if not llm.reset_prefix_cache():
        raise EngineError(
            "vLLM could not drop its prefix cache, because requests of an earlier call still hold blocks; completions "
            "would begin with keys and values of other weights: open the engine anew"
        )


def sampling_params(sampling: SamplingParams, stop: tuple[int, ...], seed: int | None) -> Any:
    """vLLM's parameters of a request that draws from `seed`."""
    from vllm import SamplingParams as VLLMParams

    return VLLMParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        stop_token_ids=list(dict.fromkeys([*stop, *sampling.stop_token_ids])),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )


def scoring_params() -> Any:
    """vLLM's parameters for the logprobs of given tokens, which it has at temperature 1 only."""
    from vllm import SamplingParams as VLLMParams

    return VLLMParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)


def completion(output: Any) -> Completion:
    """vLLM's output as our value. Raises EngineError if it was aborted or if a logprob is not finite."""
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a completion with {output.finish_reason!r}: see its log for the reason")
    return Completion(list(output.token_ids), _finite_logprobs(output), output.finish_reason)


def sampled_part(state: Any) -> Completion:
    """What vLLM has sampled so far for a request that is about to be aborted. Raises as `completion` does."""
    from vllm.v1.engine import FinishReason

    output = state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]
    return Completion(list(output.token_ids), _finite_logprobs(output), "unfinished")


def _finite_logprobs(output: Any) -> list[float]:
    logprobs = first_at_each_position(output.logprobs)
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(
            "the model gave a token a logprob that is not finite: its weights, the adapter or the noise hold inf or nan"
        )
    return logprobs


def first_at_each_position(flat: Any) -> list[float]:
    """The logprob of each position's own token, which vLLM lists first. The first position of a prompt has none."""
    starts = zip(flat.start_indices, flat.end_indices, strict=True)
    return [flat.logprobs[start] for start, end in starts if end > start]
