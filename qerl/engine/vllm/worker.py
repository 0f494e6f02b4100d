"""The workers that the engine names in vLLM's `worker_cls`: they prepare the model between loading and the capture of
CUDA graphs, and time each part of the start."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.compilation.counter import compilation_counter
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker

from qerl.engine.vllm.chosen import Chosen, Reader, check_cache
from qerl.engine.vllm.expert_check import check_experts
from qerl.engine.vllm.experts import runners
from qerl.engine.vllm.options import Options
from qerl.engine.vllm.products import BASES
from qerl.engine.vllm.rounding import check_rounding
from qerl.engine.vllm.sampling import FusedSampler
from qerl.engine.vllm.sleep import KV_CACHE, allocator
from qerl.engine.vllm.startup import Parts, split_compiling
from qerl.engine.vllm.tune import choose_ways_
from qerl.formats.nvfp4.ways import TOKENS

_latest: weakref.ref[QerlWorker] | None = None


def latest() -> QerlWorker | None:
    """The worker that was made last, if it still exists: after an opening that failed there is no other way to it."""
    return None if _latest is None else _latest()


class QerlWorker(Worker):
    """Uses our sampler, and chooses how each linear multiplies from what was measured on this card before."""

    measures = False
    chosen: Chosen | None = None  # what the routers chose, if that is recorded

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
                choose_ways_(self.measures, [size for size in sizes if size <= TOKENS[-1]])
        check_rounding(BASES.values())
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

        Packing the weights (`kernel.py`) allocates many tensors of 8 to 17 MiB. Under the limit each of them gets a
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
        with self.parts.part("profile"):
            return super().determine_available_memory()

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
        output = super().execute_model(scheduler_output)
        if self.chosen is not None and (tokens := scheduler_output.total_num_scheduled_tokens):
            self.chosen.keep_(self.model_runner.block_tables.slot_mappings[0, :tokens])
        return output

    def reader(self) -> Reader | None:
        """What tells the experts that were chosen for a request; None if they are not recorded."""
        return None if self.chosen is None else Reader(self.chosen, self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        with self.parts.part("CUDA graphs"):
            return super().compile_or_warm_up_model()

    def startup_seconds(self) -> dict[str, float]:
        """Seconds of each part so far. Compiling, which the profile run's first forward pass does, is listed apart."""
        return split_compiling(self.parts.seconds, self.vllm_config.compilation_config.compilation_time)

    def compiled_from_cache(self) -> bool:
        """Whether the model's compiled graphs came from vLLM's cache on disk."""
        return compilation_counter.num_aot_artifacts_loaded + compilation_counter.num_compiled_artifacts_loaded > 0


class MeasuringWorker(QerlWorker):
    """For rollout.tune_kernels: also measures the shapes that were not measured on this card before.

    A class of its own because vLLM leaves `worker_cls` out of the hash under which it keeps compiled graphs, and these
    are the same with and without measuring. What stands in `additional_config` is a part of that hash.
    """

    measures = True
