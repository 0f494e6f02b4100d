"""Close vLLM 0.25.1 in a process that goes on: what its own shutdown leaves referred to is let go of, in order.

vLLM ends its engine with the process and frees little before. After `EngineCore.shutdown` these still hold memory of
the card; each function below says which it lets go of:

1. CUDA graphs, in the runner's manager and in each `CUDAGraphWrapper`: `drop_graphs_`.
2. The KV cache, through the attention layers, while vLLM takes its pool down: `drop_kv_cache_`.
3. The model, by the arguments of a finalizer that runs when the LLMEngine is collected: `run_finalizer_`. A collection
   that finds the engine still sees the model, so one alone gives no weights back: `collect_`.
4. The runner, whose buffers live as long as anything refers to the worker: `drop_runner_`.
5. The model again, by a hook on compiled bytecode that vLLM registers twice and removes once: `drop_hooks_`.
6. Buffers of modules, ours and vLLM's, compiled code and cuBLAS's work space: `drop_caches_`.

What of the KV cache is referred to even then is unmapped (`sleep.give_back_closed`). Loaded kernels and the CUDA
context stay until the process ends, and so do the weights of a policy model that the caller still holds. Remove what
vLLM comes to do in its shutdown (vllm-project/vllm, `EngineCore.shutdown` and `GPUModelRunner.shutdown`).
"""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from typing import Any

logger = logging.getLogger(__name__)

MOST_COLLECTIONS = 8  # each may free what holds the next


def shut_down_(llm: Any) -> None:
    """vLLM's own shutdown, and before and after it what needs its objects."""
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
    """All of this process, which has one engine at a time; their pool is then free, and the next engine takes another.

    A pool with anything left in it may not be captured into again: torch's allocator asserts that a graph uses it.
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
    """Take its KV cache from each layer of `static_forward_context`, and views of it from the layer's attention."""
    import torch

    for layer in layers.values():
        if hasattr(layer, "kv_cache"):
            layer.kv_cache = torch.tensor([]) if isinstance(layer.kv_cache, torch.Tensor) else []
        for name in ("_k_scale_cache", "_v_scale_cache"):  # of an 8-bit cache with scales in it
            if hasattr(getattr(layer, "impl", None), name):
                setattr(layer.impl, name, None)


def run_finalizer_(engine: Any) -> None:
    """The LLMEngine's, now: the registry of finalizers refers to the model until it has run."""
    if (finalizer := getattr(engine, "_finalizer", None)) is not None:
        finalizer()


def drop_runner_(worker: Any) -> None:
    """The runner with its input, sampling and block-table buffers; the worker is no use without it."""
    worker.model_runner = None


def drop_hooks_(owner: type) -> None:
    """Dynamo's hooks on bytecode that are methods of an `owner`, of this whole process.

    vLLM 0.25.1 decorates both Qwen3Model and the Qwen2Model that it is made of, so `TorchCompileWithNoGuardsWrapper`
    is set up twice, and the handle of its first hook is lost before `cleanup` removes the second. The hook is needed
    while the model compiles and leaves its bytecode as it is. VLLM_USE_BYTECODE_HOOK=0 would do without, but belongs
    to the key of the compile cache and takes a check of vLLM's with it. Remove with vllm-project/vllm pull request
    45195; that it took effect is tested by what is alive after a close (tests/qerl/engine/test_vllm_engine_gpu.py).
    """
    from torch._dynamo.convert_frame import _bytecode_hooks

    for key in [key for key, hook in _bytecode_hooks.items() if isinstance(getattr(hook, "__self__", None), owner)]:
        del _bytecode_hooks[key]


def drop_caches_() -> None:
    """What modules keep: decoded weights, linears by address, what a reload of weights needs (a table by layer, whose
    entries stay if a tensor of theirs refers to the layer), top-k buffers, compiled code, cuBLAS's work space."""
    import torch
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.v1.sample.ops.topk_topp_triton import reset_buffer_cache

    from qerl.nvfp4.kernel_linear import release_work_buffers
    from qerl.vllm_plugin import products

    drop_hooks_(TorchCompileWithNoGuardsWrapper)
    products.forget_bases()
    release_work_buffers()
    LAYERWISE_INFO.clear()
    reset_buffer_cache()
    torch._dynamo.reset()  # compiled code keeps the model it was made of
    torch._C._cuda_clearCublasWorkspaces()  # one for each handle and stream, vLLM's side streams included


def collect_() -> int:
    """Collect until nothing more is found: how often."""
    for times in range(1, MOST_COLLECTIONS + 1):
        if not gc.collect():
            return times
    return MOST_COLLECTIONS


def give_back_() -> None:
    """Once nothing of ours refers to vLLM's objects any more: the memory goes back to the driver."""
    import torch

    from qerl.vllm_plugin import sleep

    try:
        drop_caches_()
    except Exception:
        logger.warning("caches of vLLM could not be dropped: what they hold goes with the process", exc_info=True)
    collect_()
    torch.cuda.empty_cache()
    sleep.give_back_closed()


def abandon_() -> None:
    """Give back what an opening has taken that raised, whose frames were cleared (`clear_frames_`)."""
    plugin = sys.modules.get("qerl.vllm_plugin.worker")
    if plugin is None:  # it ended before vLLM was imported
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
    """Empty the frames that `error`, and what it came of, keep: their variables are the half-open engine."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        if (one := rest.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            rest += [one.__cause__, one.__context__]
