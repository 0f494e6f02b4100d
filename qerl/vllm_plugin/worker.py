"""vLLM's worker, named by the engine's `worker_cls`: what has to be done between loading and the CUDA graphs, timed."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.compilation.counter import compilation_counter
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker

from qerl.nvfp4.ways import TOKENS
from qerl.vllm_plugin import TUNE
from qerl.vllm_plugin.linear import Options
from qerl.vllm_plugin.products import BASES
from qerl.vllm_plugin.sampling import FusedSampler
from qerl.vllm_plugin.sleep import KV_CACHE, allocator
from qerl.vllm_plugin.startup import Parts, split_compiling
from qerl.vllm_plugin.tune import choose_ways_

_latest: weakref.ref[QerlWorker] | None = None


def latest() -> QerlWorker | None:
    """The worker that was made last, if it is still there: an opening that fails hands nothing else to its caller."""
    return None if _latest is None else _latest()


class QerlWorker(Worker):
    """Puts the sampler in, and chooses how each linear multiplies."""

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
            torch.cuda.empty_cache()  # what packing left
        runner = self.model_runner
        if type(runner.sampler) is Sampler:  # a model with a sampler of its own keeps it
            runner.sampler = FusedSampler(runner.sampler)
        if BASES and not Options.of(self.vllm_config).deterministic:  # times scatter, and another way has other bits
            with self.parts.part("kernel choice"):
                sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or TOKENS
                choose_ways_(bool(os.environ.get(TUNE)), [size for size in sizes if size <= TOKENS[-1]])

    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> AbstractContextManager[Any]:
        """While weights load, vLLM forbids torch to split blocks of 20 MiB and more. Packing them (`kernel.py`) takes
        many tensors of 8 to 17 MiB, each of which would get a segment that none after it can use: 6 GiB a layer of a
        7B, until the card or the cap is full. Without the limit torch uses them again and again. Remove when vLLM's
        limit is gone, or its `process_weights_after_loading` runs outside of it."""
        return nullcontext()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """The KV cache alone sleeps. Weights in vLLM's pool would keep the process from opening a second engine."""
        if tag != KV_CACHE:
            return nullcontext()
        allocator()
        return super()._maybe_get_memory_pool_context(tag)

    def determine_available_memory(self) -> int:
        with self.parts.part("profile"):
            return super().determine_available_memory()

    def initialize_from_config(self, *args: Any, **options: Any) -> Any:
        with self.parts.part("KV cache"):
            # Told the size of the KV cache, vLLM leaves what its profile run took in torch's: another pool's memory
            # beside this one's, 1.6 GiB with a 7B.
            torch.cuda.empty_cache()
            return super().initialize_from_config(*args, **options)

    def compile_or_warm_up_model(self) -> Any:
        with self.parts.part("CUDA graphs"):
            return super().compile_or_warm_up_model()

    def startup_seconds(self) -> dict[str, float]:
        """Of the parts so far; the first forward pass, in the profile run, compiles."""
        return split_compiling(self.parts.seconds, self.vllm_config.compilation_config.compilation_time)

    def compiled_from_cache(self) -> bool:
        """Whether the model's graphs came from vLLM's cache on disk."""
        return compilation_counter.num_aot_artifacts_loaded + compilation_counter.num_compiled_artifacts_loaded > 0
