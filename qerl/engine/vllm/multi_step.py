"""Several decode steps per call of vLLM's scheduler, so that the host's work does not set the pace.

vLLM 0.25.1 schedules each step of its batch anew: 1.5 to 8 ms of Python per step, by the number of sequences, beside 1
to 9 ms of kernels. While all sequences decode, nothing is there to decide. So `MultiStepScheduler` reserves room for
`most_steps` tokens per sequence and marks its output, and `sample_steps` runs that many steps one behind the other:
each sampled token goes into the next step on the card, and the host takes all of them over at once, the way in which
vLLM takes over several tokens of a speculative step.

A sequence that meets its end between two calls runs on to the end of the call. Its further tokens are thrown away, and
its place is free a few steps later. Tokens do not depend on the number of steps: the noise of a token is drawn by its
request's seed and its position.

For each sequence vLLM would look for room, make an object per output, and append one token at a time to five lists.
Here only those that need a block, or of which a token may be the last, go through its code. The others' tokens are
appended a row at a time to the same lists, so whatever reads them (`requests.py`) finds them as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.triton_utils import tl, triton
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream
from vllm.v1.worker.gpu.sample.output import SamplerOutput

MOST_STEPS = 4  # the host's time is a quarter then; a sequence that ended costs 6 steps of its row on average


@dataclass(slots=True)
class Plain:
    """A request that nobody streams, with the logprob of each token and nothing else that vLLM would look at."""

    stops: frozenset[int | None]
    end: int  # tokens of prompt and completion at its limit
    tokens: tuple[list[int], ...]  # the lists in which vLLM keeps the tokens
    logprobs: FlatLogprobs

    def take_(self, tokens: list[int], logprobs: list[float], ranks: list[int]) -> None:
        """Append the tokens of several steps."""
        for known in self.tokens:
            known.extend(tokens)
        flat, count = self.logprobs, len(tokens)
        begun = len(flat.logprobs)
        flat.start_indices.extend(range(begun, begun + count))
        flat.end_indices.extend(range(begun + 1, begun + count + 1))
        flat.logprobs.extend(logprobs)
        flat.ranks.extend(ranks)
        flat.decoded_tokens.extend([None] * count)


def plain(request: Any, state: Any, model_len: int) -> Plain | None:
    """The request of vLLM's scheduler with its `state` in vLLM's output processor as a plain one; None if it is not."""
    params = request.sampling_params
    if state is None or params is None or request.resumable or request.mm_features or request.use_structured_output:
        return None
    flat, detokenizer = state.logprobs_processor.logprobs, state.detokenizer
    if type(flat) is not FlatLogprobs or params.num_logprobs or type(detokenizer) is not IncrementalDetokenizer:
        return None
    if state.output_kind is not RequestOutputKind.FINAL_ONLY or params.repetition_detection or state.stats is not None:
        return None
    return Plain(
        stops=frozenset((params.eos_token_id, *(params.stop_token_ids or ()))),
        end=min(request.num_prompt_tokens + request.max_tokens, model_len),
        tokens=(request._output_token_ids, request._all_token_ids, detokenizer.token_ids, flat.token_ids),
        logprobs=flat,
    )


class MultiStepScheduler(AsyncScheduler):
    """vLLM's scheduler, whose batches of decoding sequences may be for several steps.

    `most_batch` is the largest batch for which there is a CUDA graph of a decode step; larger ones, and any with a
    sequence that is not decoding, are for one step as in vLLM. It is 0, so nothing changes, until `allow_steps_` is
    called. `states` are those of vLLM's output processor, by the names of requests.
    """

    most_steps, most_batch = 1, 0
    states: Mapping[str, Any] = {}
    groups: tuple[Any, ...] = ()  # of the KV cache; none if the shorter way does not hold for them

    def allow_steps_(self, most_steps: int, most_batch: int, states: Mapping[str, Any] = states) -> None:
        self.most_steps, self.most_batch, self.states = most_steps, most_batch, states
        self.num_lookahead_tokens = most_steps - 1  # vLLM reserves room in the KV cache for so many more
        groups = self.kv_cache_manager.coordinator.single_type_managers
        # A block of a state is for the whole sequence. A window would give blocks back meanwhile.
        whole = [type(each) is FullAttentionManager or each.block_size >= self.max_model_len for each in groups]
        other = (self.connector, self.ec_connector, self.lora_config, self.num_spec_tokens)
        other += (self.enable_kv_cache_events, self.enable_return_routed_experts, self.log_stats)
        caching = self.cache_config.enable_prefix_caching
        fits = most_batch and all(whole) and not any(other) and not (caching and len(groups) > 1)
        self.groups = groups if fits else ()

    def add_request(self, request: Any) -> None:
        request.plain = plain(request, self.states.get(request.request_id), self.max_model_len)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = self.decode_again() if self.groups else None
        if output is None:
            if self.most_batch:
                self._hold_back_ending()
            output = super().schedule(throttle_prefills)
        if steps := self._steps(output):
            for name in output.num_scheduled_tokens if steps > 1 else ():
                request = self.requests[name]
                request.num_computed_tokens += steps - 1
                request.num_output_placeholders += steps - 1
            output.decode_steps = steps
        return output

    def decode_again(self) -> SchedulerOutput | None:
        """What vLLM's own method returns, and does, if all sequences only go on; None if it has to decide something."""
        may_begin = (self.waiting or self.skipped_waiting) and len(self.running) < self.max_num_running_reqs
        if may_begin or self._pause_state is not PauseState.UNPAUSED:
            return None
        requests, grown, blocks = [], {}, 0
        caches = self.cache_config.enable_prefix_caching
        for request in self.running:
            own, computed = request.plain, request.num_computed_tokens
            if own is None or request.is_prefill_chunk:
                return None
            if computed + 1 >= own.end:  # it reaches its limit with what is under way
                continue
            known, name = len(request._all_token_ids), request.request_id
            if known + request.num_output_placeholders != computed + 1:
                return None
            needed = min(computed + 1 + self.num_lookahead_tokens, self.max_model_len)
            for group in self.groups:
                missing = needed - len(group.req_to_blocks[name]) * group.block_size
                if missing > 0 or (caches and known // group.block_size > group.num_cached_block.get(name, 0)):
                    grown[name] = request
                    blocks += max(0, -(-missing // group.block_size))
            requests.append(request)
        most = min(self.most_batch, self.max_num_scheduled_tokens)
        if not 0 < len(requests) <= most or blocks > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        return self._for(requests, grown)

    def _for(self, requests: list[Any], grown: dict[str, Any]) -> SchedulerOutput:
        """vLLM's output for one step of decoding `requests`, of which `grown` need blocks or fill one."""
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        for name, request in grown.items():
            computed = request.num_computed_tokens
            needed = min(computed + 1 + self.num_lookahead_tokens, self.max_model_len)
            new = self.kv_cache_manager.coordinator.allocate_new_blocks(name, needed, computed + 1)
            grown[name] = tuple([block.block_id for block in own] for own in new) if any(new) else None
            self.kv_cache_manager.cache_blocks(request, len(request._all_token_ids))
        names = [request.request_id for request in requests]
        computed = [request.num_computed_tokens for request in requests]
        outputs = [known + 1 - request.num_prompt_tokens for known, request in zip(computed, requests, strict=True)]
        output, blocks = SchedulerOutput.make_empty(), [grown.get(name) for name in names]
        output.scheduled_cached_reqs = CachedRequestData(names, set(), [], {}, blocks, computed, outputs)
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = dict.fromkeys(names, 1), len(names)
        output.num_common_prefix_blocks = [0] * len(self.groups)  # for cascade attention, which this runner has not
        output.finished_req_ids, output.preempted_req_ids = self.finished_req_ids, self.reset_preempted_req_ids
        if self.needs_kv_cache_zeroing:
            output.new_block_ids_to_zero = self.kv_cache_manager.take_new_block_ids() or None
        for request in requests:
            request.num_computed_tokens += 1
            request.num_output_placeholders += 1
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        left = self._take_over(scheduler_output, model_runner_output)
        if not left and scheduler_output.num_scheduled_tokens:
            return {}
        scheduler_output = copy(scheduler_output)
        scheduler_output.num_scheduled_tokens = left
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_over(self, scheduled: SchedulerOutput, sampled: ModelRunnerOutput) -> dict[str, int]:
        """Take over the tokens of sequences that go on; returns what is left for vLLM, which looks at each token."""
        steps, lists, others = steps_of(scheduled), sampled.logprobs, sampled.prompt_logprobs_dict
        if not self.groups or lists is None or lists.logprobs.shape != (len(sampled.req_ids) * steps, 1):
            return scheduled.num_scheduled_tokens
        left, group = {}, self.groups[0] if self.cache_config.enable_prefix_caching else None
        logprobs, ranks = (each.reshape(-1, steps).tolist() for each in (lists.logprobs, lists.sampled_token_ranks))
        for name, count in scheduled.num_scheduled_tokens.items():
            request, row = self.requests.get(name), sampled.req_id_to_index[name]
            tokens = sampled.sampled_token_ids[row]
            own = None if request is None or name in others or request.async_tokens_to_discard else request.plain
            goes_on = own is not None and request.status is RequestStatus.RUNNING and request._output_token_ids
            known = len(request._all_token_ids) + steps if goes_on else 0
            if not goes_on or known >= own.end or len(tokens) != steps or not own.stops.isdisjoint(tokens):
                left[name] = count
                continue
            own.take_(tokens, logprobs[row], ranks[row])
            request.num_output_placeholders -= steps
            if group is not None and known // group.block_size > group.num_cached_block.get(name, 0):
                request.update_block_hashes()
                written = request.num_computed_tokens - request.num_output_placeholders
                self.kv_cache_manager.cache_blocks(request, written)
        return left

    def _hold_back_ending(self) -> None:
        """Leave out the sequences that reach their limit with what is under way.

        vLLM's own test allows for rejected tokens of a speculative step and would run each once more.
        """
        for request in self.running:
            if request.num_computed_tokens + 1 >= request.num_prompt_tokens + request.max_tokens:
                request.next_decode_eligible_step = self.current_step + 2

    def _steps(self, output: SchedulerOutput) -> int:
        """For how many steps this batch can be; 0 if not all of its sequences decode."""
        count = len(output.num_scheduled_tokens)
        decodes = output.total_num_scheduled_tokens == count and not output.scheduled_new_reqs
        if not decodes or not count or output.has_structured_output_requests:
            return 0
        requests = [self.requests[name] for name in output.num_scheduled_tokens]
        if any(request.is_prefill_chunk for request in requests):
            return 0
        if count > self.most_batch or any(request.plain is None for request in requests):
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
    if (most_batch := largest_decode_graph(runner)) and _plans(runner):
        advance_(*torch.empty(2, 0, dtype=torch.int32, device=runner.device), runner)  # compiles the kernel
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.allow_steps_(most_steps, most_batch, llm.llm_engine.output_processor.request_states)


def largest_decode_graph(runner: Any) -> int:
    """The largest batch of decoding sequences that a CUDA graph of vLLM's model runner covers; 0 if there is none."""
    graphs = getattr(getattr(runner, "cudagraph_manager", None), "graphs", {})
    return max((graph.num_tokens for graph in graphs if graph.cg_mode == CUDAGraphMode.FULL), default=0)


@torch.inference_mode()
def sample_steps(runner: Any, steps: int, after_forward: Callable[[int], None]) -> AsyncModelRunnerOutput:
    """Sample for the batch whose first forward pass is launched, and run and sample `steps - 1` further ones.

    `runner` is vLLM's. `after_forward(tokens)` is called after each further forward pass. Nothing here waits for the
    card.
    """
    state, runner.execute_model_state = runner.execute_model_state, None
    batch, hidden = state.input_batch, state.hidden_states
    if (spaces := _plans(runner)) and getattr(runner.sampler, "covers", lambda rows: False)(batch.idx_mapping_np):
        drawn = _draw_steps(runner, batch, hidden, steps, spaces, after_forward)
    else:
        sampled = [_sample_(runner, batch, hidden)]
        for _ in range(steps - 1):
            hidden = _forward_again_(runner, batch, sampled[-1].sampled_token_ids)
            after_forward(batch.num_tokens)
            sampled.append(_sample_(runner, batch, hidden))
        each = [(one.sampled_token_ids[:, 0], one.logprobs_tensors.logprobs[:, 0]) for one in sampled]
        drawn = [torch.stack(column) for column in zip(*each, strict=True)]
    return DrawnTokens(batch.req_ids, *drawn, runner.main_stream, runner.output_copy_stream)


class DrawnTokens(AsyncModelRunnerOutput):
    """Tokens and logprobs of several steps on their way to the host, (steps, at least as many as `names`) each.

    vLLM's AsyncOutput is for tensors by sequence, with ranks and counts. Ranks are not known here, and said to be 0.
    """

    def __init__(self, names: list[str], tokens: torch.Tensor, logprobs: torch.Tensor, main: Any, copying: Any) -> None:
        self.names, self.on_card = names, (tokens, logprobs)  # they have to live until they are copied
        self.copy_event = torch.cuda.Event(blocking=True)
        with stream(copying, main):
            copying.wait_stream(main)
            self.on_host = [async_copy_to_np(each) for each in self.on_card]
            self.copy_event.record(copying)

    def get_output(self) -> ModelRunnerOutput:
        self.copy_event.synchronize()
        count = len(self.names)
        tokens, logprobs = (each[:, :count].T for each in self.on_host)
        flat, starts = tokens.reshape(-1, 1), [*range(0, tokens.size + 1, tokens.shape[1])]
        lists = LogprobsLists(flat, logprobs.reshape(-1, 1), np.zeros_like(flat[:, 0]), starts)
        numbers = {name: row for row, name in enumerate(self.names)}
        return ModelRunnerOutput(self.names, numbers, tokens.tolist(), logprobs=lists, prompt_logprobs_dict={})


def _plans(runner: Any) -> list[Any]:
    """What plans the work of attention, if it is all that vLLM would prepare anew for each further step; else none."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    if type(runner.model_state) is not DefaultModelState or runner.model_state.rope_state is not None:
        return []
    builders = [group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups]
    spaces = [getattr(builder, "space", None) for builder in builders]
    return [] if None in spaces or runner.block_tables.cp_size != 1 else spaces


def _draw_steps(
    runner: Any, batch: Any, hidden: torch.Tensor, steps: int, spaces: list[Any], after_forward: Callable[[int], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_sample_` and `_forward_again_` do, for our sampler and our attention.

    Returns tokens, int64, and logprobs, float32, (steps, sequences up to a multiple of 16): so each step's part is
    aligned, and Triton compiles one kernel for all numbers of sequences.

    In a batch that only decodes, each row of hidden states is one that is sampled from, and one token is sampled per
    row. So nothing is gathered or counted, and what vLLM would prepare anew for each step is one launch.
    """
    from qerl.engine.vllm.kernels import draw

    count, rows = batch.num_reqs, batch.idx_mapping
    of_sampling, buffers = runner.sampler.sampling_states, runner.input_buffers
    given = rows, of_sampling.temperature.gpu, of_sampling.seeds.gpu, buffers.positions[:count]
    lengths = buffers.seq_lens[: batch.num_reqs_after_padding]
    graph = runner.cudagraph_manager.dispatch(count, count, 1, 0)
    shape = (steps, -(-count // 16) * 16)
    tokens = torch.empty(shape, dtype=torch.int64, device=rows.device)
    logprobs = torch.empty(shape, dtype=torch.float32, device=rows.device)
    for step in range(steps):
        draw(runner.model.compute_logits(hidden[:count]), *given, out=(tokens[step], logprobs[step]))
        if step + 1 == steps:
            break
        advance_(rows, tokens[step], runner)
        for space in spaces:
            space.plan_(lengths)
        hidden = runner.cudagraph_manager.run_fullgraph(graph)
        after_forward(count)
    one = torch.ones_like(rows)
    runner.postprocess_sampled(rows, tokens[-1].view(-1, 1), one, torch.zeros_like(rows), batch.query_start_loc)
    runner.req_states.num_computed_tokens_np[batch.idx_mapping_np] += steps - 1
    return tokens, logprobs


@triton.jit
def _advance_kernel(
    rows, tokens, computed, last, known, width, total, ids, positions, lengths, slots, most, tables, strides, sizes,
    GROUPS: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    row = tl.load(rows + place).to(tl.int64)
    token = tl.load(tokens + place)
    length = tl.load(total + row)
    tl.store(last + row, token)
    tl.store(known + row * width + length, token.to(tl.int32))
    tl.store(total + row, length + 1)
    position = tl.load(computed + row) + 1
    tl.store(computed + row, position)
    tl.store(ids + place, token.to(tl.int32))
    tl.store(positions + place, position.to(tl.int64))
    tl.store(lengths + place, position + 1)
    for group in tl.static_range(GROUPS):
        size = tl.load(sizes + group)
        table = tl.cast(tl.load(tables + group), tl.pointer_type(tl.int32)) + row * tl.load(strides + group)
        slot = tl.load(table + position // size) * size + position % size
        tl.store(slots + group * most + place, slot.to(tl.int64))


def advance_(rows: torch.Tensor, tokens: torch.Tensor, runner: Any) -> None:
    """Note sampled tokens in the state of vLLM's model runner, and make them the input of its next step.

    `rows` (sequences,) int32 are their places in that state, `tokens` (sequences,) int64. It is in one launch what
    vLLM's `post_update` and `compute_slot_mappings` do in two, and the three copies between them.
    """
    state, buffers, tables = runner.req_states, runner.input_buffers, runner.block_tables
    known, slots = state.all_token_ids.gpu, tables.slot_mappings
    noted = state.num_computed_tokens.gpu, state.last_sampled_tokens, known, known.stride(0), state.total_len.gpu
    inputs = buffers.input_ids, buffers.positions, buffers.seq_lens, slots, slots.stride(0)
    blocks = tables.block_table_ptrs, tables.block_table_strides, tables.block_sizes_tensor
    arguments = rows, tokens.long(), *noted, *inputs, *blocks
    _advance_kernel[(len(rows),)](*arguments, GROUPS=tables.num_kv_cache_groups, num_warps=1)


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
