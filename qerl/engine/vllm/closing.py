"""Close vLLM 0.25.1 in a process that goes on, by dropping, in order, the references that its own shutdown leaves.

vLLM expects the process to end with its engine. After `EngineCore.shutdown` these still keep memory of the card alive:

1. CUDA graphs, in the runner's manager and in each `CUDAGraphWrapper`: `drop_graphs_`.
2. The KV cache, through the attention layers: `drop_kv_cache_`; what is left is unmapped (`worker.give_back_closed`).
3. The model, through the arguments of the finalizer of LLMEngine: `run_finalizer_`, and more than one `collect_`.
4. The runner, whose buffers live as long as anything refers to the worker: `drop_runner_`.
5. Buffers of modules and the work space of cuBLAS: `drop_caches_`.

Loaded kernels, the CUDA context and a policy model that the caller holds stay. Remove each step once vLLM does it.
"""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from typing import Any

logger = logging.getLogger(__name__)

MOST_COLLECTIONS = 8  # each may free objects that keep others alive
# Private attributes of vLLM's objects
FINALIZER = "_finalizer"  # of the LLMEngine
SCALE_CACHES = ("_k_scale_cache", "_v_scale_cache")  # of an attention, for an 8-bit cache that contains its scales


def shut_down_(llm: Any) -> None:
    """Run vLLM's own shutdown, and before and after it the steps that need its objects."""
    import torch

    engine = llm.llm_engine
    worker = engine.model_executor.driver_worker.worker
    torch.cuda.synchronize()
    drop_graphs_(worker.model_runner)
    drop_kv_cache_(engine.vllm_config.compilation_config.static_forward_context)
    run_finalizer_(engine)
    try:
        engine.engine_core.shutdown()
    finally:
        drop_runner_(worker)


def drop_graphs_(runner: Any) -> None:
    """Drop all graphs of this process, which has one engine at a time, and make the next engine take another pool.

    A pool with anything left in it must not be captured into again: torch's allocator asserts that a graph uses it.
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.platforms import current_platform

    CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        manager.graphs.clear()
    type(current_platform)._global_graph_pool = None


def drop_kv_cache_(layers: dict[str, Any]) -> None:
    """Drop the KV cache of each layer in `static_forward_context`, and the views of it that its attention keeps."""
    import torch

    for layer in layers.values():
        if hasattr(layer, "kv_cache"):
            layer.kv_cache = torch.tensor([]) if isinstance(layer.kv_cache, torch.Tensor) else []
        for name in SCALE_CACHES:
            if hasattr(getattr(layer, "impl", None), name):
                setattr(layer.impl, name, None)


def run_finalizer_(engine: Any) -> None:
    """Run the finalizer of the LLMEngine now, since the registry of finalizers refers to the model until it has run."""
    if (finalizer := getattr(engine, FINALIZER, None)) is not None:
        finalizer()


def drop_runner_(worker: Any) -> None:
    """Drop the runner with its input, sampling and block-table buffers; the worker is of no use without it."""
    worker.model_runner = worker.chosen = None


def drop_caches_() -> None:
    """Drop what modules cache.

    These are decoded weights, our list of linears, vLLM's table of what each layer needs for reloading weights (whose
    entries stay if one of their tensors refers to the layer), top-k buffers, and cuBLAS's work space.
    """
    import torch
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.v1.sample.ops.topk_topp_triton import reset_buffer_cache

    from qerl.engine.vllm import linear
    from qerl.formats.nvfp4.kernel_layout import release_work_buffers

    linear.forget_bases()
    release_work_buffers()
    LAYERWISE_INFO.clear()
    reset_buffer_cache()
    torch._C._cuda_clearCublasWorkspaces()  # there is one per handle and stream, including vLLM's side streams


def collect_() -> int:
    """Collect garbage until nothing more is found; returns how many collections that took."""
    for times in range(1, MOST_COLLECTIONS + 1):
        if not gc.collect():
            return times
    return MOST_COLLECTIONS


def give_back_() -> None:
    """Return the memory to the driver. Call it when nothing of ours refers to vLLM's objects any more."""
    import torch

    from qerl.engine.vllm import worker

    try:
        drop_caches_()
    except Exception:
        logger.warning("vLLM's caches could not be dropped: their memory is freed when the process ends", exc_info=True)
    collect_()
    torch.cuda.empty_cache()
    worker.give_back_closed()


def abandon_() -> None:
    """Free what an engine had taken when its opening failed. Clear the error's frames first (`clear_frames_`)."""
    plugin = sys.modules.get("qerl.engine.vllm.worker")
    if plugin is None:  # it failed before vLLM was imported
        return
    worker = plugin.latest()
    if worker is not None and getattr(worker, "model_runner", None) is not None:
        try:
            drop_graphs_(worker.model_runner)
            drop_kv_cache_(worker.vllm_config.compilation_config.static_forward_context)
            worker.shutdown()
        except Exception:
            logger.warning("vLLM could not be shut down after the opening failed", exc_info=True)
        drop_runner_(worker)
    del worker
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    give_back_()


def clear_frames_(error: BaseException) -> None:
    """Clear the frames that `error` and its causes keep, because their variables refer to the half-open engine."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        if (one := rest.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            rest += [one.__cause__, one.__context__]
