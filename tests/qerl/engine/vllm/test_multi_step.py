"""Batches that only decode: our shorter way through vLLM's scheduler against vLLM's own way, plan by plan.

Scheduler, KV cache, output processor and requests are vLLM's; the card draws a token by its sequence and position.
"""

import importlib.util
import os
import random
import zlib
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from qerl.engine.interface import SamplingParams
from qerl.engine.vllm import requests

END, SEQUENCES, CONTEXT, BLOCK = 0, 6, 96, 4
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="needs vllm")


def scheduler(blocks, steps, batch, caching, states):
    from vllm.config import CacheConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from qerl.engine.vllm.multi_step import MultiStepScheduler

    scheduling = SchedulerConfig(
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=32,
        max_model_len=CONTEXT,
        enable_chunked_prefill=True,
        async_scheduling=True,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.5, enable_prefix_caching=caching)
    cache.num_gpu_blocks = blocks
    nothing = ("lora", "kv_events", "kv_transfer", "ec_transfer", "speculative")
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            max_model_len=CONTEXT,
            is_diffusion=False,
            enable_return_routed_experts=False,
            is_multimodal_model=False,
        ),
        scheduler_config=scheduling,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
        num_speculative_tokens=0,
        use_v2_model_runner=True,
        max_concurrent_batches=2,
        **{f"{name}_config": None for name in nothing},
    )
    state = {"shapes": ((2,), (1,)), "dtypes": (torch.float32,) * 2, "mamba_cache_mode": "none"}
    specs = [MambaSpec(block_size=CONTEXT, page_size_padded=None, **state) for _ in range(states)]
    specs.append(FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32))
    groups = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
    made = MultiStepScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=SimpleNamespace(should_advance=lambda request: False),
        mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda config: False),
        block_size=CONTEXT if states else BLOCK,
        hash_block_size=BLOCK if caching else None,
        log_stats=False,
    )
    made.steps_and_batch = steps, batch
    return made


def token(name, position):
    drawn = zlib.crc32(f"{name} {position}".encode()) % 40
    return END if drawn == 39 else 1 + drawn % 19


class StandIn:
    """vLLM's LLMEngine in this process, with two batches under way; `plans` are what its scheduler gave."""

    def __init__(self, scheduler, shorter):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.engine.output_processor import OutputProcessor

        self.scheduler, self.batches, self.plans, self.computed, self.known = scheduler, deque(), [], {}, {}
        self.output_processor = OutputProcessor(None, log_stats=False)
        scheduler.allow_steps_(*scheduler.steps_and_batch, self.output_processor.request_states)
        if not shorter:
            scheduler.groups = ()
        caching = scheduler.cache_config.enable_prefix_caching
        self.hasher = get_request_block_hasher(BLOCK, sha256) if caching else None

    def add(self, name, prompt, params):
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        request = EngineCoreRequest(
            request_id=f"{name}-0",
            external_req_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            **dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")),
            arrival_time=0.0,
        )
        self.output_processor.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, self.hasher))

    def abort(self, name):
        """Take a request out; returns what it had sampled."""
        from vllm.v1.engine import FinishReason
        from vllm.v1.request import RequestStatus

        if (state := self.output_processor.request_states.get(f"{name}-0")) is None:
            return None
        output = state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]
        found = [*output.token_ids], requests.first_at_each_position(output.logprobs)
        self.output_processor.abort_requests([f"{name}-0"], internal=True)
        self.scheduler.finish_requests([f"{name}-0"], RequestStatus.FINISHED_ABORTED)
        return found

    def step(self):
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            self.plans.append((noted(plan), self.blocks()))
            self.batches.appendleft((plan, self.sampled(plan)))
            if len(self.batches) < 2:
                return []
        outputs = self.scheduler.update_from_output(*self.batches.pop()).get(0)
        return self.output_processor.process_outputs(outputs.outputs if outputs else []).request_outputs

    def sampled(self, plan):
        """What the card gives for a plan, with the sequences' lengths as the model runner keeps them."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        from qerl.engine.vllm.multi_step import steps_of

        for new in plan.scheduled_new_reqs:
            self.computed[new.req_id], self.known[new.req_id] = new.num_computed_tokens, len(new.prefill_token_ids)
        cached = plan.scheduled_cached_reqs
        assert [self.computed[name] for name in cached.req_ids] == cached.num_computed_tokens
        scheduled, steps, drawn, rows = plan.num_scheduled_tokens, steps_of(plan), [], []
        names = sorted(scheduled, key=scheduled.get)
        for name in names:
            ends = [self.computed[name] + scheduled[name] + step for step in range(steps)]
            self.computed[name] = ends[-1]
            drawn += [token(name, end) for end in ends]
            rows.append([token(name, end) for end in ends if end >= self.known[name]])
        flat = torch.tensor(drawn, dtype=torch.int64).numpy().reshape(-1, 1)
        starts = None if steps == 1 else [*range(0, len(flat) + 1, steps)]
        lists = LogprobsLists(flat, -flat / 8, flat[:, 0] * 0, starts)
        numbers = {name: row for row, name in enumerate(names)}
        return ModelRunnerOutput(names, numbers, rows, logprobs=lists, prompt_logprobs_dict={})

    def blocks(self):
        """Which blocks the sequences have, which are cached, and which are free, in that order."""
        pool = self.scheduler.kv_cache_manager.block_pool
        groups = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        held = [{name: [b.block_id for b in own] for name, own in group.req_to_blocks.items()} for group in groups]
        hashes = {block.block_id: block.block_hash for block in pool.blocks if block.block_hash is not None}
        return held, hashes, [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def noted(plan):
    """What vLLM's model runner reads of a plan."""
    cached = plan.scheduled_cached_reqs
    news = [(new.req_id, new.num_computed_tokens, new.block_ids, list(new.prefill_token_ids)) for new in
            plan.scheduled_new_reqs]  # fmt: skip
    own = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens)
    whole = (plan.num_scheduled_tokens, plan.total_num_scheduled_tokens, plan.finished_req_ids, plan.preempted_req_ids)
    return news, own, whole, (getattr(plan, "decode_steps", 0), plan.new_block_ids_to_zero)


def served(seed, shorter, caching, states):
    """A random rollout: what ended in which order, what was taken out, the plans, and how many took the shorter way."""
    from vllm.sampling_params import RequestOutputKind

    drawn = random.Random(seed)
    blocks = drawn.choice([30, 45, 90]) + 2 * states * SEQUENCES
    made = scheduler(blocks, drawn.choice([1, 2, 4, 8]), drawn.choice([SEQUENCES, 2]), caching, states)
    engine, found, short, waiting = StandIn(made, shorter), [], [], deque(range(drawn.randint(4, 16)))
    decode_again = made.decode_again
    made.decode_again = lambda: short.append(decode_again()) or short[-1]
    start = [drawn.randint(1, 19) for _ in range(12)]
    for number in range(10_000):
        while waiting and drawn.random() < 0.3:
            name = f"{seed}.{waiting.popleft()}"
            prompt = [*start[: drawn.randint(1, 12)], *(drawn.randint(1, 19) for _ in range(drawn.randint(0, 20)))]
            sampling = SamplingParams(max_new_tokens=min(drawn.choice([1, 3, 30, 90]), CONTEXT - len(prompt)))
            params = requests.sampling_params(sampling, (END, drawn.choice([END, 5])), drawn.randint(0, 9))
            params.output_kind = RequestOutputKind.FINAL_ONLY
            params.min_tokens = drawn.choice([0, 0, min(3, params.max_tokens)])
            engine.add(name, prompt, params)
        if drawn.random() < 0.02:
            name = f"{seed}.{drawn.randint(0, 15)}"
            found.append((number, name, engine.abort(name)))
        if not made.has_requests() and not engine.batches:
            if not waiting:
                break
            continue
        found += [(number, done.request_id, requests.completion(done.outputs[0]), done.outputs[0].stop_reason)
                  for done in engine.step()]  # fmt: skip
    return found, engine.plans, engine.blocks(), sum(each is not None for each in short)


@pytest.mark.parametrize(("caching", "states"), [(True, 0), (False, 0), (False, 2)])
def test_the_shorter_way_gives_the_plans_blocks_and_completions_of_vllm_s(caching, states):
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    taken = 0
    for seed in range(5):
        theirs, ours = (served(seed, shorter, caching, states) for shorter in (False, True))
        assert ours[:3] == theirs[:3]
        assert not theirs[3]
        taken += ours[3]
    assert taken > 50


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[16], [16, 8]])
def test_an_advance_is_vllm_s_update_copies_and_slots(sizes):
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.input_batch import InputBuffers, post_update
    from vllm.v1.worker.gpu.states import RequestState

    from qerl.engine.vllm.multi_step import advance_

    device, most, length, count = torch.device(DEVICE), 8, 100, 5
    rows = torch.tensor([6, 0, 3, 7, 2], dtype=torch.int32, device=device)
    tokens, computed = (
        torch.arange(count, device=device) * 11 + 7,
        torch.tensor([4, 15, 31, 60, 8], device=device).int(),
    )
    found = []
    for ours in (False, True):
        state, buffers = RequestState(most, length, 64, 0, 100, device), InputBuffers(most, 64, device)
        tables = BlockTables(sizes, most, 64, [-(-length // size) for size in sizes], device, sizes)
        for table in tables.block_tables:
            table.gpu.copy_(torch.arange(table.gpu.numel()).view_as(table.gpu) % 50)
        state.num_computed_tokens.gpu[rows.long()], state.total_len.gpu[rows.long()] = computed, computed + 1
        buffers.positions[:count], buffers.seq_lens[:count] = computed.long(), computed + 1
        buffers.query_start_loc.copy_(torch.arange(most + 1).clamp(max=count))
        starts, positions = buffers.query_start_loc, buffers.positions
        tables.compute_slot_mappings(rows, starts, positions, most)
        known = (state.num_computed_tokens.gpu, state.last_sampled_tokens, state.all_token_ids.gpu, state.total_len.gpu)
        if ours:
            advance_(rows, tokens, SimpleNamespace(req_states=state, input_buffers=buffers, block_tables=tables))
        else:
            one = torch.ones_like(rows)
            post_update(rows, *known[:2], None, tokens.view(-1, 1), one, one - 1, starts, *known[2:])
            buffers.input_ids[:count] = tokens
            positions[:count] += 1
            buffers.seq_lens[:count] += 1
            tables.compute_slot_mappings(rows, starts, positions, most)
        found.append([*known, buffers.input_ids, positions, buffers.seq_lens, tables.slot_mappings])
    for theirs, own in zip(*found, strict=True):
        assert torch.equal(theirs, own)
