"""A call of vLLM that ends when there is enough: what has not ended by then is taken out with the tokens it has.

vLLM 0.25.1 gives partial outputs to callers that stream, for which it makes an object per request and step. Here the
output of a request is made once, when it is aborted (`RequestState.make_request_output`).

With asynchronous scheduling a forward pass is still under way when requests are aborted. It writes into the KV cache,
which the next sleep unmaps, so the engine is stepped until nothing is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qerl.engine.vllm.requests import aborted_on_error, enqueued, rare_collections, sampled_part

if TYPE_CHECKING:
    from qerl.engine.interface import Completion


def run_supplied(
    llm: Any,
    begin: Callable[[], Sequence[tuple[int, Sequence[int], Any]] | None],
    take: Callable[[int, Any], object],
    ended: Callable[[list[int]], bool],
) -> dict[int, Completion]:
    """Run what `begin()` gives, (index, token ids, vLLM's parameters) each, until it gives None or nothing is left.

    `take(index, output)` gets each output that is complete. `ended` is told of them, and its True asks `begin` again.
    Returns what is unfinished. Raises what `requests.run` raises.
    """
    engine, indices = llm.llm_engine, {}
    with aborted_on_error(llm, 1), rare_collections():
        while (new := begin()) is not None and (new or engine.has_unfinished_requests()):
            if new:
                names = enqueued(llm, [prompt for _, prompt, _ in new], [params for _, _, params in new])
                indices |= dict(zip(names, (index for index, _, _ in new), strict=True))
            while engine.has_unfinished_requests():
                done = [(indices[output.request_id], output) for output in engine.step() if output.finished]
                for index, output in done:
                    take(index, output)
                if done and ended([index for index, _ in done]):
                    break
        return _taken_out(llm, indices)


def _taken_out(llm: Any, indices: dict[str, int]) -> dict[int, Completion]:
    """Abort all requests; returns what each had sampled, by index."""
    engine, left = llm.llm_engine, {}
    states = dict(engine.output_processor.request_states)
    for name, state in states.items():
        left[indices[name.partition("-")[0]]] = sampled_part(state)
    engine.abort_request(list(states), internal=True)
    core = engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:
        engine.step()
    return left
