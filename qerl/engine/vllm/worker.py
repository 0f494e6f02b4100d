"""The workers that the engine names in vLLM's `worker_cls`, with their sampler and the sleep of the KV cache.

A worker prepares the model between loading and the capture of CUDA graphs, and times each part of the start.
`FusedSampler` reads the logits once to get a token and its logprob.

The sleep frees the KV cache and nothing else. vLLM's own level 1 moves the weights to the host and back, and its level
2 drops them; ours have to stay, because the trainer uses them as well. Addresses do not change, so the CUDA graphs stay
valid. Remove when vLLM's sleep takes tags.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm.device_allocator import HandleType
from vllm.device_allocator.cumem import CuMemAllocator, create_and_map, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker

from qerl.engine.vllm.experts import check_experts, runners
from qerl.engine.vllm.kernels import draw
from qerl.engine.vllm.layers import rotate_inside_
from qerl.engine.vllm.linear import BASES, Options, check_rounding, choose_ways_
from qerl.engine.vllm.multi_step import sample_steps, steps_of
from qerl.engine.vllm.opening import Parts
from qerl.engine.vllm.requests import Chosen, Reader, check_cache
from qerl.formats.nvfp4.ways import TOKENS
from qerl.plan.engine_memory import GRAPHS, grown_by_others

_latest: weakref.ref[QerlWorker] | None = None


def latest() -> QerlWorker | None:
    """The worker that was made last, if it still exists: after an opening that failed there is no other way to it."""
    return None if _latest is None else _latest()


class QerlWorker(Worker):
    """Uses our sampler, and checks how each linear multiplies."""

    chosen: Chosen | None = None  # what the routers chose, if that is recorded
    _steps = 1  # of the batch whose forward pass was launched last

    def __init__(self, *args: Any, **options: Any) -> None:
        global _latest
        super().__init__(*args, **options)
        self.parts = Parts()
        _latest = weakref.ref(self)

    def init_device(self) -> None:
        with self.parts.part("device"):
            super().init_device()

    def load_model(self, **options: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        with self.parts.part("weights"):
            super().load_model(**options)
            self.loading_peak_bytes = torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()  # packing the weights left unused memory behind
        runner = self.model_runner
        if type(runner.sampler) is Sampler:  # a model with a sampler of its own keeps it
            runner.sampler = FusedSampler(runner.sampler)
        if BASES and not Options.of(self.vllm_config).deterministic:  # times vary, and so would the bits
            with self.parts.part("kernel choice"):
                sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or TOKENS
                choose_ways_([size for size in sizes if size <= TOKENS[-1]])
        check_rounding(BASES)
        rotate_inside_(runner.model)
        if layers := runners(runner.model):
            with self.parts.part("experts"):
                check_experts(runner.model)
            if Options.of(self.vllm_config).records_experts:
                self.chosen = self._recorder(layers.values())

    def _recorder(self, layers: Collection[MoERunner]) -> Chosen:
        """What records the routers' choices. It has to be there before CUDA graphs are captured."""
        moe = [layer.moe_config for layer in layers]
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        routers = [layer.router for layer in layers]
        return Chosen(routers, moe[0].experts_per_token, moe[0].num_experts, tokens, self.device)

    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> AbstractContextManager[Any]:
        """Lift a limit of vLLM, which forbids torch to split blocks of 20 MiB and more while weights load.

        Packing the weights (`linear.py`) allocates many tensors of 8 to 17 MiB. Under the limit each of them gets a
        segment that no later one can use, 6 GiB per layer of a 7B, until the card or the cap is full. Without it torch
        uses the segments again. Remove when vLLM drops the limit, or runs `process_weights_after_loading` outside it.
        """
        return nullcontext()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """Let only the KV cache sleep: weights in vLLM's pool would keep the process from opening a second engine."""
        if tag != KV_CACHE:
            return nullcontext()
        allocator()
        return super()._maybe_get_memory_pool_context(tag)

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache.

        vLLM's own method asserts that more of the card is free afterwards, which fails if another process takes memory
        meanwhile. Remove when vLLM (0.25.1: v1/worker/gpu_worker.py) drops that assertion.
        """
        torch.accelerator.synchronize()
        self._get_sleep_mode_backend().suspend(level)

    def determine_available_memory(self) -> int:
        """vLLM's measure for the KV cache, without what other processes took or gave back meanwhile.

        vLLM 0.25.1 takes every change of the card's memory for its own: beside a neighbour that starts, nothing is left
        for the cache, and beside one that ends it asserts. Remove when it counts by process.
        """
        with self.parts.part("profile"):
            if self.cache_config.kv_cache_memory_bytes:  # nothing is measured
                return super().determine_available_memory()
            self.init_snapshot.free_memory = self.init_snapshot.total_memory  # for the assertion; else only logged
            found = super().determine_available_memory() + grown_by_others(self.non_torch_memory)
            return min(found, torch.cuda.mem_get_info(self.device)[0] - GRAPHS)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        with self.parts.part("KV cache"):
            # When vLLM is told the size of the KV cache, it does not free what its profile run allocated: 1.6 GiB with
            # a 7B, in another pool than the cache and useless to it.
            torch.cuda.empty_cache()
            super().initialize_from_config(kv_cache_config)
        if self.chosen is not None:
            groups = kv_cache_config.kv_cache_groups
            check_cache(len(groups), getattr(self.model_runner, "block_tables", None))
            self.chosen.allocate_(kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        clear_states_(self.model_runner, scheduler_output)
        output = super().execute_model(scheduler_output)
        self._steps = steps_of(scheduler_output)
        self._keep_choices(scheduler_output.total_num_scheduled_tokens)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self._steps == 1:
            return super().sample_tokens(grammar_output)
        return sample_steps(self.model_runner, self._steps, self._keep_choices)

    def _keep_choices(self, tokens: int) -> None:
        """Keep what the routers chose in the latest forward pass, of so many tokens."""
        if self.chosen is not None and tokens:
            self.chosen.keep_(self.model_runner.block_tables.slot_mappings[0, :tokens])

    def reader(self) -> Reader | None:
        """What tells the experts that were chosen for a request; None if they are not recorded."""
        return None if self.chosen is None else Reader(self.chosen, self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        with self.parts.part("CUDA graphs"):
            return super().compile_or_warm_up_model()

    def startup_seconds(self) -> dict[str, float]:
        """Seconds of each part so far."""
        return self.parts.seconds


def clear_states_(runner: Any, batch: SchedulerOutput) -> None:
    """Zero the states of sequences that begin with a single token.

    vLLM 0.25.1 takes that token for a later one of a sequence, and so reads the states that its blocks held before. A
    prompt of one token is such, and a longer one of which one token still fits the batch. Remove when vLLM's builder
    for linear attention (v1/attention/backends/gdn_attn.py) tells them apart.
    """
    one = [new for new in batch.scheduled_new_reqs if batch.num_scheduled_tokens.get(new.req_id) == 1]
    begun = [new for new in one if not new.num_computed_tokens]
    if not begun:
        return
    layers = runner.compilation_config.static_forward_context
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, MambaSpec):
            blocks = [block for new in begun for block in new.block_ids[number]]
            for name in group.layer_names:
                for state in layers[name].kv_cache:
                    state[blocks] = 0


class FusedSampler(Sampler):
    """vLLM's sampler with its last steps fused into two launches.

    vLLM 0.25.1 (v1/worker/gpu/sample) copies the logits to float32, draws (Gumbel-max), sums the exponentials in one
    program per sequence, and counts the token's rank, which a rollout does not need. That takes 0.16 ms per step with
    one sequence and 0.68 ms with 256 (7B, H200). The noise here is the same as vLLM's (Philox by the request's seed and
    position, -log(-log1p(-u))), but it uses all four numbers of a Philox call, so a seed gives other tokens than in
    vLLM.

    A batch with a request that asks for more (top-k, top-p, min-p, penalties, biases, bad words, more logprobs) goes to
    vLLM's own sampler. Ranks are always 0. Remove when vLLM's sampler reads the logits once and counts no rank unless
    asked.
    """

    def __init__(self, replaced: Sampler) -> None:
        """Take over the state of vLLM's sampler, so that its requests go to the same arrays."""
        self.__dict__.update(replaced.__dict__)

    def __call__(self, logits: torch.Tensor, input_batch) -> SamplerOutput:
        if logits.shape[0] != input_batch.num_reqs or not self.covers(input_batch.idx_mapping_np):
            return super().__call__(logits, input_batch)
        states = self.sampling_states
        positions = input_batch.positions[input_batch.logits_indices]
        tokens, logprobs = draw(
            logits, input_batch.expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, positions
        )
        counts = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens.view(-1, 1),
            logprobs_tensors=LogprobsTensors(
                logprob_token_ids=tokens.view(-1, 1),
                logprobs=logprobs.view(-1, 1),
                selected_token_ranks=torch.zeros_like(tokens),
                cu_num_generated_tokens=None,
            ),
            num_nans=None,
            num_sampled=counts[0],
            num_rejected=counts[1],
        )

    def covers(self, rows: np.ndarray) -> bool:
        """Whether no request of the batch asks for more than a temperature, a seed and the token's own logprob."""
        states = self.sampling_states
        return (
            self.logprobs_mode == "processed_logprobs"
            and not self.compute_nans
            and bool((states.num_logprobs[rows] == 0).all())
            and bool((states.top_k.np[rows] == states.vocab_size).all())
            and bool((states.top_p.np[rows] == 1.0).all())
            and bool((states.min_p.np[rows] == 0.0).all())
            and not self.penalties_state.use_penalty[rows].any()
            and not self.logit_bias_state.use_logit_bias[rows].any()
            and not self.bad_words_state.num_bad_words.np[rows].any()
            and self.logprob_token_ids_state.max_num_token_ids(rows) == 0
        )


KV_CACHE = "kv_cache"  # the tag under which vLLM allocates the KV cache
CLOSED = "closed"  # our tag for the KV cache of a closed engine


class KVCacheAllocator(CuMemAllocator):
    """vLLM's allocator, which here can also free memory that sleeps.

    vLLM's C code unmaps the memory that it frees. For sleeping memory, which is already unmapped, that fails, and the
    error stays set in a variable that makes the next allocation fail, which is the next engine's
    (csrc/cumem_allocator.cpp, `error_code`; for ROCm vLLM guards against it). So such memory is mapped again just
    before. Remove when vLLM's CUDA path has a guard of its own.
    """

    def _python_free_callback(self, ptr: int) -> HandleType:
        data = self.pointer_to_data[ptr]
        if data.is_asleep:
            create_and_map(data.handle)
            data.is_asleep = False
        return super()._python_free_callback(ptr)


def allocator() -> CuMemAllocator:
    """The allocator of this process: ours, unless something has already used vLLM's."""
    if CuMemAllocator.instance is None:
        CuMemAllocator.instance = KVCacheAllocator()
        atexit.register(CuMemAllocator._shutdown_singleton)
    return CuMemAllocator.get_instance()


class KVCacheBackend(SleepModeBackend):
    """Our sleep mode, registered with vLLM as `qerl_kv`."""

    def suspend(self, level: int = 1) -> None:
        self._state = "SUSPENDED"
        for data in allocator().pointer_to_data.values():
            if data.tag == KV_CACHE and not data.is_asleep:
                unmap_and_release(data.handle)
                data.is_asleep = True

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        allocator().wake_up([KV_CACHE])
        self._state = "RUNNING"

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True


def kv_cache_bytes() -> int:
    """The number of bytes that `suspend` frees."""
    return sum(d.handle[1] for d in allocator().pointer_to_data.values() if d.tag == KV_CACHE)


def give_back_closed() -> int:
    """Free the KV cache of a closed engine although references keep it alive; returns the number of bytes.

    It cannot be used again.
    """
    rest = [data for data in allocator().pointer_to_data.values() if data.tag == KV_CACHE]
    for data in rest:
        if not data.is_asleep:
            unmap_and_release(data.handle)
            data.is_asleep = True
        data.tag = CLOSED
    return sum(data.handle[1] for data in rest)
