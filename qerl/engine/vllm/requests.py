"""A call of vLLM: the requests that it gets, the outputs that come back, and the experts that its routers chose.

vLLM's `LLM.generate` returns when the last sequence has ended. `serve` makes the same requests (`LLM.enqueue`) and the
same steps, hands on each output as soon as it is complete, and lets further requests begin between the steps.

Two things would go wrong in silence. An interrupted call leaves its requests in vLLM's scheduler, and the next call
would get their completions among its own: `serve` aborts them. And vLLM only logs it if it keeps its prefix cache:
`drop_prefix_cache` raises. No vllm.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch

from qerl.base.errors import EngineError
from qerl.engine.interface import UNRECORDED, Completion, SamplingParams
from qerl.engine.memory import out_of_memory

NEW_OBJECTS = (100_000, 50, 100)  # thresholds of Python's garbage collector, for gc.set_threshold
AT_ONCE = 64  # requests per step that go to vLLM, which takes 0.3 ms for each; the card works on earlier ones meanwhile


Asked = tuple[int, Sequence[int], Any]  # index, token ids and vLLM's parameters of a request


def serve(
    llm: Any,
    begin: Callable[[bool], Sequence[Asked] | None],
    take: Callable[[list[tuple[int, Any]]], object],
) -> dict[int, Completion]:
    """Run the requests that `begin` gives, and return what each unfinished one has sampled if `begin` ends the call.

    `begin(idle)` is asked between vLLM's steps and gives what begins now. None ends the call, and so does nothing while
    vLLM is `idle`. `take` gets (index, output) of each request that a step has completed. Raises EngineError if memory
    runs out, and whatever `begin` and `take` raise.

    vLLM 0.25.1 gives partial outputs to callers that stream, for which it makes an object per request and step. Here
    the output of an unfinished request is made once, when it is aborted (`RequestState.make_request_output`). With
    asynchronous scheduling a forward pass is still under way then. It writes into the KV cache, which the next sleep
    unmaps, so the engine is stepped until nothing is left of it.
    """
    engine, indices = llm.llm_engine, {}
    waiting: list[Asked] = []
    with aborted_on_error(llm, indices), rare_collections():
        while True:
            idle = not waiting and not engine.has_unfinished_requests()
            new = begin(idle)
            if new is None:
                indices |= _enqueued(llm, waiting)
                return _taken_out(llm, indices)
            if idle and not new:
                break
            waiting += new
            indices |= _enqueued(llm, waiting[:AT_ONCE])
            del waiting[:AT_ONCE]
            done = [output for output in engine.step() if output.finished]
            if unknown := [output.request_id for output in done if output.request_id not in indices]:
                raise EngineError(f"vLLM returned {unknown[:3]}, which this call did not ask for: open the engine anew")
            if done:
                take([(indices.pop(output.request_id), output) for output in done])
    if indices:
        raise EngineError(f"vLLM returned nothing for {len(indices)} requests: open the engine anew")
    return {}


def _enqueued(llm: Any, asked: Sequence[Asked]) -> dict[str, int]:
    """Hand requests to vLLM; returns the index of each by the name that vLLM's outputs call it."""
    if not asked:
        return {}
    prompts = [{"prompt_token_ids": list(prompt)} for _, prompt, _ in asked]
    names = llm.enqueue(prompts, [params for _, _, params in asked], use_tqdm=False)
    # vLLM 0.25.1 calls a request "NUMBER-RANDOM" (or "NUMBER", by an environment variable) and its output "NUMBER".
    return {name.partition("-")[0]: index for name, (index, _, _) in zip(names, asked, strict=True)}


def _taken_out(llm: Any, indices: Mapping[str, int]) -> dict[int, Completion]:
    """Abort all requests; returns what each had sampled, by index."""
    engine = llm.llm_engine
    states = dict(engine.output_processor.request_states)
    left = {indices[name.partition("-")[0]]: _sampled_part(state) for name, state in states.items()}
    engine.abort_request(list(states), internal=True)
    core = engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:
        engine.step()
    return left


@contextmanager
def aborted_on_error(llm: Any, running: Sized) -> Iterator[None]:
    """Take all requests from vLLM if the block raises, Ctrl-C included. Raises EngineError if memory runs out."""
    try:
        yield
    except BaseException as error:
        abandoned = list(llm.llm_engine.output_processor.request_states)
        llm.llm_engine.abort_request(abandoned, internal=True)
        if isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory(f"a call of {len(running)} sequences", error) from error
        raise


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
        seed=seed,
        stop_token_ids=list(dict.fromkeys([*stop, *sampling.stop_token_ids])),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,  # a deep copy takes a tenth of what vLLM does per request
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


def _sampled_part(state: Any) -> Completion:
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


logger = logging.getLogger(__name__)


class Chosen:
    """The ids that the routers of a model chose, uint8, `UNRECORDED` where no token has been.

    vLLM 0.25.1 can return them itself (`enable_return_routed_experts`), but not with the model runner that qerl needs,
    and not for tokens that it found in its prefix cache. Here each router writes its ids into a static buffer, inside
    the CUDA graphs. After each forward pass the worker copies the rows of that buffer to the slots that the tokens'
    keys and values went to. A token's slot belongs to every request that reads its keys and values, so a cached prompt
    is covered too.
    """

    def __init__(self, routers: Sequence[Any], chosen: int, experts: int, tokens: int, device: torch.device) -> None:
        """`routers` are vLLM's, from the first layer with experts to the last; `tokens` is the most that a forward
        pass can have. Call it before CUDA graphs are captured.

        Raises EngineError for more experts than a byte can name.
        """
        if experts > UNRECORDED:
            raise EngineError(
                f"the model has {experts} experts in a layer, and replay names them in a byte: write "
                "rollout.router_replay: false"
            )
        shape = (tokens, len(routers), chosen)
        self._latest = torch.full(shape, UNRECORDED, dtype=torch.uint8, device=device)
        self._kept: torch.Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for place, router in enumerate(routers):
            router.set_capture_fn(self._writer(place))

    def allocate_(self, slots: int) -> None:
        """Make room for a KV cache of so many tokens."""
        latest = self._latest
        shape = (slots, *latest.shape[1:])
        self._kept = torch.full(shape, UNRECORDED, dtype=torch.uint8, device=latest.device)

    def unrecorded(self, tokens: int) -> torch.Tensor:
        """What `read` gives for tokens of which nothing is known."""
        return torch.full((tokens, *self._latest.shape[1:]), UNRECORDED, dtype=torch.uint8)

    def keep_(self, slots: torch.Tensor) -> None:
        """Copy the choices of the latest forward pass, whose tokens went to `slots` (tokens,) int64."""
        self._kept.index_copy_(0, slots, self._latest[: len(slots)])

    def read(self, blocks: torch.Tensor, block_size: int, tokens: int) -> torch.Tensor:
        """The choices of the first `tokens` tokens of a request, (tokens, layers, k) on the CPU.

        `blocks` (blocks,) int32 are its numbers in the KV cache, on the device, of `block_size` tokens each.
        """
        if self._stream is None:
            return self._read(blocks, block_size, tokens)
        with torch.cuda.stream(self._stream):
            return self._read(blocks, block_size, tokens)

    def _read(self, blocks: torch.Tensor, block_size: int, tokens: int) -> torch.Tensor:
        return self._kept[slots_of(blocks, block_size, tokens)].cpu()

    def _writer(self, place: int) -> Callable[[torch.Tensor], None]:
        own = self._latest[:, place]

        def write(ids: torch.Tensor) -> None:
            own[: len(ids)].copy_(ids)

        return write


def slots_of(blocks: torch.Tensor, block_size: int, tokens: int) -> torch.Tensor:
    """The slots (tokens,) int64 of a request's first tokens."""
    place = torch.arange(tokens, device=blocks.device)
    return blocks.long()[place // block_size] * block_size + place % block_size


class Reader:
    """Reads what was chosen for requests of vLLM, by the names of their outputs; `runner` is vLLM's model runner.

    A request is read as soon as vLLM has returned its last token. Its slots then belong to nobody, but no forward pass
    that could write to them has been scheduled: the scheduler frees blocks when it takes the token over, and it has not
    been asked for another step since. The copy to the host runs on a stream of its own, because the next forward pass
    may already be under way; the rows are complete, since a step copies them before it samples.
    """

    def __init__(self, chosen: Chosen, runner: Any) -> None:
        self._chosen, self._runner = chosen, runner

    def of_output(self, output: Any) -> torch.Tensor:
        """What was chosen for a complete output, for all of its tokens but the last.

        A request that vLLM took its blocks from while its last token was still being sampled, because the KV cache was
        full, is unrecorded.
        """
        states, tables = self._runner.req_states, self._runner.block_tables
        # vLLM calls a request "NUMBER-RANDOM" (or "NUMBER") and its output "NUMBER".
        names = [name for name in states.req_id_to_index if name.partition("-")[0] == output.request_id]
        tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        if not names:
            logger.warning(
                "the experts chosen for a completion of %d tokens are not known, so the trainer chooses its own: the "
                "KV cache was full when it ended",
                tokens,
            )
            return self._chosen.unrecorded(tokens)
        row = states.req_id_to_index[names[0]]
        return self._chosen.read(tables.block_tables[0].gpu[row], tables.kernel_block_sizes[0], tokens)


def check_cache(groups: int, block_tables: Any) -> None:
    """Raise EngineError for a KV cache in which a token has more than one slot, or a runner that has no tables."""
    if block_tables is None or groups != 1 or block_tables.cp_size != 1:
        raise EngineError(
            "vLLM keeps keys and values of this model in a way (several groups, or another model runner) for which "
            "qerl cannot tell which experts were chosen: write rollout.router_replay: false, and leave "
            "VLLM_USE_V2_MODEL_RUNNER unset"
        )
