"""Several decode steps per call of vLLM's scheduler, so that the host's work does not set the pace.

vLLM 0.25.1 schedules each step of its batch anew: 1.5 to 8 ms of Python per step, by the number of sequences, beside 1
to 9 ms of kernels. While all sequences decode, nothing is there to decide. So `MultiStepScheduler` reserves room for
`most_steps` tokens per sequence and marks its output, and `sample_steps` runs that many steps one behind the other:
each sampled token goes into the next step on the card, and the host takes all of them over at once, the way in which
vLLM takes over several tokens of a speculative step.

A sequence that meets its end between two calls runs on to the end of the call. Its further tokens are thrown away, and
its place is free a few steps later. Tokens do not depend on the number of steps: the noise of a token is drawn by its
request's seed and its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.sample.output import SamplerOutput

MOST_STEPS = 4  # the host's time is a quarter then; a sequence that ended costs 6 steps of its row on average


class MultiStepScheduler(AsyncScheduler):
    """vLLM's scheduler, whose batches of decoding sequences may be for several steps.

    `most_batch` is the largest batch for which there is a CUDA graph of a decode step; larger ones, and any with a
    sequence that is not decoding, are for one step as in vLLM. It is 0, so nothing changes, until `allow_steps_` is
    called.
    """

    most_steps, most_batch = 1, 0

    def allow_steps_(self, most_steps: int, most_batch: int) -> None:
        self.most_steps, self.most_batch = most_steps, most_batch
        self.num_lookahead_tokens = most_steps - 1  # vLLM reserves room in the KV cache for so many more

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.most_batch:
            self._hold_back_ending()
        output = super().schedule(throttle_prefills)
        if (steps := self._steps(output)) > 1:
            for name in output.num_scheduled_tokens:
                request = self.requests[name]
                request.num_computed_tokens += steps - 1
                request.num_output_placeholders += steps - 1
            output.decode_steps = steps
        return output

    def _hold_back_ending(self) -> None:
        """Leave out the sequences that reach their limit with what is under way.

        vLLM's own test allows for rejected tokens of a speculative step and would run each once more.
        """
        for request in self.running:
            if request.num_computed_tokens + 1 >= request.num_prompt_tokens + request.max_tokens:
                request.next_decode_eligible_step = self.current_step + 2

    def _steps(self, output: SchedulerOutput) -> int:
        """For how many steps this batch can be."""
        count = len(output.num_scheduled_tokens)
        decodes = output.total_num_scheduled_tokens == count and not output.scheduled_new_reqs
        if not decodes or not 0 < count <= self.most_batch or output.has_structured_output_requests:
            return 1
        requests = [self.requests[name] for name in output.num_scheduled_tokens]
        if any(request.is_prefill_chunk for request in requests):
            return 1
        left = max(each.num_prompt_tokens + each.max_tokens - each.num_computed_tokens for each in requests)
        room = self.max_model_len - max(each.num_computed_tokens for each in requests)
        return max(1, min(self.most_steps, left, room))


def steps_of(output: SchedulerOutput) -> int:
    """For how many steps a batch of the scheduler is."""
    return getattr(output, "decode_steps", 1)


def allow_steps_(llm: Any, most_steps: int = MOST_STEPS) -> None:
    """Let the batches of vLLM's LLM be for several steps, up to the largest that has a CUDA graph."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    llm.llm_engine.engine_core.engine_core.scheduler.allow_steps_(most_steps, largest_decode_graph(runner))


def largest_decode_graph(runner: Any) -> int:
    """The largest batch of decoding sequences that a CUDA graph of vLLM's model runner covers; 0 if there is none."""
    graphs = getattr(getattr(runner, "cudagraph_manager", None), "graphs", {})
    return max((graph.num_tokens for graph in graphs if graph.cg_mode == CUDAGraphMode.FULL), default=0)


@torch.inference_mode()
def sample_steps(runner: Any, steps: int, after_forward: Callable[[int], None]) -> AsyncOutput:
    """Sample for the batch whose first forward pass is launched, and run and sample `steps - 1` further ones.

    `runner` is vLLM's. `after_forward(tokens)` is called after each further forward pass. Nothing here waits for the
    card.
    """
    state, runner.execute_model_state = runner.execute_model_state, None
    batch, hidden = state.input_batch, state.hidden_states
    sampled = [_sample_(runner, batch, hidden)]
    for _ in range(steps - 1):
        hidden = _forward_again_(runner, batch, sampled[-1].sampled_token_ids)
        after_forward(batch.num_tokens)
        sampled.append(_sample_(runner, batch, hidden))
    output = ModelRunnerOutput(
        req_ids=batch.req_ids,
        req_id_to_index={name: row for row, name in enumerate(batch.req_ids)},
        sampled_token_ids=None,  # AsyncOutput fills it in
        prompt_logprobs_dict={},
    )
    joined = joined_steps(sampled)
    return AsyncOutput(output, joined, joined.num_sampled, runner.main_stream, runner.output_copy_stream)


def _sample_(runner: Any, batch: Any, hidden: torch.Tensor) -> SamplerOutput:
    """Sample one token per sequence and note it in the runner's state."""
    sampled, counts, rejected = runner.sample(hidden, batch, None)
    runner.postprocess_sampled(batch.idx_mapping, sampled.sampled_token_ids, counts, rejected, batch.query_start_loc)
    return sampled


def _forward_again_(runner: Any, batch: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Run the model on `tokens` (sequences, 1), which follow those of the batch; returns its hidden states."""
    count, padded = batch.num_reqs, batch.num_reqs_after_padding
    buffers, tables = runner.input_buffers, runner.block_tables
    runner.req_states.num_computed_tokens_np[batch.idx_mapping_np] += 1
    batch.seq_lens_cpu_upper_bound[:count] += 1
    buffers.input_ids[:count].copy_(tokens.view(-1))
    buffers.positions[:count] += 1
    buffers.seq_lens[:count] += 1
    slots = tables.compute_slot_mappings(
        batch.idx_mapping, batch.query_start_loc, batch.positions, num_tokens_padded=batch.num_tokens_after_padding
    )
    blocks = tuple(table[:padded] for table in tables.input_block_tables)
    graph = runner.cudagraph_manager.dispatch(count, batch.num_tokens, 1, 0)
    runner.model_state.prepare_attn(batch, graph.cg_mode, blocks, slots, runner.attn_groups, runner.kv_cache_config)
    return runner.cudagraph_manager.run_fullgraph(graph)


def joined_steps(outputs: Sequence[SamplerOutput]) -> SamplerOutput:
    """The tokens of several steps as those of one, (sequences, steps), with logprobs in the order of the tokens."""
    steps, tokens = len(outputs), torch.cat([output.sampled_token_ids for output in outputs], dim=1)
    count = len(tokens)

    def rows(field: str) -> torch.Tensor:  # of all steps of the first sequence, then of the second, ...
        return torch.stack([getattr(output.logprobs_tensors, field) for output in outputs], dim=1).flatten(0, 1)

    logprobs = None
    if outputs[0].logprobs_tensors is not None:
        logprobs = LogprobsTensors(
            *(rows(field) for field in ("logprob_token_ids", "logprobs", "selected_token_ranks")),
            cu_num_generated_tokens=[*range(0, count * steps + 1, steps)],
        )
    return SamplerOutput(
        sampled_token_ids=tokens,
        logprobs_tensors=logprobs,
        num_nans=None,
        num_sampled=torch.full((count,), steps, dtype=torch.int32, device=tokens.device),
        num_rejected=torch.zeros(count, dtype=torch.int32, device=tokens.device),
    )
