"""A call of vLLM: what is asked of it and what comes back.

vLLM's `LLM.generate` returns when the last sequence has ended. `run` makes the same requests (`LLM.enqueue`) and the
same steps, and hands each output on when it is there.

An interrupted call leaves its requests in vLLM's scheduler, and the next call would return their completions among its
own; and vLLM only logs that it kept its prefix cache. `run` and `drop_prefix_cache` see to both.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from qerl.engine.interface import Completion, SamplingParams
from qerl.errors import EngineError
from qerl.vllm_plugin.exhausted import out_of_memory

T = TypeVar("T")

NEW_OBJECTS = (100_000, 50, 100)  # of a generation, before it is searched


def run(llm: Any, prompts: Sequence[Sequence[int]], params: Any, take: Callable[[int, Any], T]) -> list[T]:
    """What `take(index, output)` makes of vLLM's output for each of `prompts` (token ids), in their order; `params` for
    all or for each.

    It is called for each output when it ends, while vLLM still has the others. Raises EngineError where memory runs
    out, and what `take` raises.
    """
    import torch

    taken: dict[int, T] = {}
    ended = 0
    try:
        with rare_collections():
            names = llm.enqueue([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
            # vLLM 0.25.1 names a request "NUMBER-RANDOM" ("NUMBER", if its environment says so), its output "NUMBER".
            indices = {name.partition("-")[0]: index for index, name in enumerate(names)}
            for output in _as_they_end(llm.llm_engine):
                ended += 1
                if (index := indices.get(output.request_id)) is not None:
                    taken[index] = take(index, output)
    except BaseException as error:  # Ctrl-C as well
        abandoned = list(llm.llm_engine.output_processor.request_states)
        llm.llm_engine.abort_request(abandoned, internal=True)
        if isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory(f"a call of {len(prompts)} sequences", error) from error
        raise
    if not ended == len(taken) == len(prompts):
        raise EngineError(f"vLLM returned {ended} completions for {len(prompts)} prompts: open the engine anew")
    return [taken[index] for index in range(len(prompts))]


def _as_they_end(engine: Any) -> Iterator[Any]:
    """The outputs of all that vLLM has to do; parts of one, which are not asked for, are left out."""
    while engine.has_unfinished_requests():
        yield from (output for output in engine.step() if output.finished)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Inside the block Python looks for unreachable cycles only after many new objects. vLLM's scheduler makes
    thousands a step, none of them in cycles: with 256 sequences a step takes 7.7 ms of the CPU with Python's thresholds
    and 6.1 without any search, and the GPU 9."""
    before = gc.get_threshold()
    gc.set_threshold(*NEW_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def drop_prefix_cache(llm: Any) -> None:
    """Forget keys and values of other weights. Raises EngineError where vLLM would go on using them."""
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
    """For the logprobs of given tokens, which vLLM has at temperature 1 alone."""
    from vllm import SamplingParams as VLLMParams

    return VLLMParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)


def completion(output: Any) -> Completion:
    """Raises EngineError for one that was aborted, or whose logprobs are no numbers."""
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a completion with {output.finish_reason!r}: see its log for the reason")
    logprobs = first_at_each_position(output.logprobs)
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(
            "the model gave a token a logprob that is not finite: its weights, the adapter or the noise hold inf or nan"
        )
    return Completion(list(output.token_ids), logprobs, output.finish_reason)


def first_at_each_position(flat: Any) -> list[float]:
    """The logprob of the token itself, which vLLM lists first; positions without one (the first token) are left out."""
    starts = zip(flat.start_indices, flat.end_indices, strict=True)
    return [flat.logprobs[start] for start, end in starts if end > start]
