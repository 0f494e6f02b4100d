"""Memory: a single copy of the weights, sleep, a KV cache that overflows, an engine that is closed."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine_checks.compare import mismatch, policy_logprobs, same
from engine_checks.context import Context
from qerl.base.errors import EngineError
from qerl.engine.interface import SamplingParams

VLLM_TYPES = ("LLMEngine", "EngineCore", "QerlWorker", "GPUModelRunner", "CUDAGraphWrapper", "AdapterLinearMethod")


def loading(context: Context) -> dict:
    """The memory that torch took from the card while the weights were loaded and packed."""
    from qerl.engine.vllm import worker

    files = sum(path.stat().st_size for path in Path(context.arguments.model).glob("*.safetensors"))
    return {"peak_gib": worker.latest().loading_peak_bytes / 2**30, "checkpoint_gib": files / 2**30}


def shared_memory(context: Context) -> dict:
    """Every parameter of the policy is stored inside a tensor of the engine, so the base is in memory once."""
    from qerl.engine.vllm.worker import kv_cache_bytes
    from qerl.formats.linear import PackedLinear

    engine_storages = storages(context.engine.found.model)
    foreign, linears = [], 0
    for name, parameter in context.policy.named_parameters():
        if parameter.untyped_storage().data_ptr() not in engine_storages:
            foreign.append(name)
    for name, module in context.policy.named_modules():
        if isinstance(module, PackedLinear):
            linears += 1
            pointers = {tensor.untyped_storage().data_ptr() for tensor in _packed(module)}
            if not pointers <= set(engine_storages):
                foreign.append(name)
    bias_bytes = sum(
        module.bias.nbytes
        for module in context.policy.modules()
        if isinstance(module, PackedLinear) and module.bias is not None
    )
    files = sum(path.stat().st_size for path in Path(context.arguments.model).glob("*.safetensors"))
    factors = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for slot in context.engine.found.slots.values()
        for tensor in (slot.lora_a, slot.lora_b)
    }
    gc.collect()
    return {
        "allocated_gib": (torch.cuda.memory_allocated() - kv_cache_bytes()) / 2**30,
        "adapter_gib": sum(factors.values()) / 2**30,
        "foreign": [name for name in foreign if not name.endswith(".bias")],
        "kernel_linears": linears,
        "engine_gib": sum(engine_storages.values()) / 2**30,
        "checkpoint_gib": files / 2**30,
        "bias_mib_held_twice": bias_bytes / 2**20,
    }


def _packed(linear: torch.nn.Linear) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a packed linear's weight."""
    from qerl.formats.fp8.linear import FP8Linear

    if isinstance(linear, FP8Linear):
        return linear.weight_codes, linear.weight_scale
    return linear.kernel_weight.words, linear.kernel_weight.scales


def storages(model: torch.nn.Module) -> dict[int, int]:
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.untyped_storage()
        if tensor.is_cuda:
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def sleep_and_wake(context: Context) -> dict:
    """Sleeping frees the KV cache and nothing else, and sampling gives the same results afterwards.

    So it does if others take more of the card than it frees, while it falls asleep.
    """
    from qerl.engine.vllm.worker import kv_cache_bytes

    engine = context.engine
    before = engine.generate(context.prompts[:8], context.greedy)
    pointers = sorted(storages(engine.found.model))
    gc.collect()
    torch.cuda.empty_cache()  # sleep() does this too, and what that frees would be counted as KV cache
    used = _used_gib()
    times = []
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.sleep()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - started) * 1e3)
    asleep = _used_gib()
    logprobs = policy_logprobs(context.policy, context.prompts[:1], [[5, 6, 7]])
    gc.collect()
    started = time.perf_counter()
    engine.wake()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - started) * 1e3)
    with _others_taking(kv_cache_bytes() + 2**26):
        engine.sleep()
    engine.wake()
    after = engine.generate(context.prompts[:8], context.greedy)
    return {
        "used_gib": used,
        "asleep_gib": asleep,
        "awake_gib": _used_gib(),
        "kv_gib": kv_cache_bytes() / 2**30,
        "sleep_ms": times[0],
        "wake_ms": times[1],
        "same_pointers": pointers == sorted(storages(engine.found.model)),
        "policy_works_asleep": len(logprobs[0]) == 3,
        "same": same(before, after),
    }


@contextmanager
def _others_taking(size: int) -> Iterator[None]:
    """So many bytes of the card are taken as soon as the KV cache is free, until this ends.

    Under `memory.cap_gib` there has to be room for both, since the cap still counts the KV cache then.
    """
    from qerl.engine.vllm.worker import KVCacheBackend

    suspend, taken = KVCacheBackend.suspend, []

    def suspended(backend: KVCacheBackend, level: int = 1) -> None:
        suspend(backend, level)
        taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    KVCacheBackend.suspend = suspended
    try:
        yield
    finally:
        KVCacheBackend.suspend = suspend
    assert taken


def _used_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def exhausted_cache(context: Context) -> dict:
    """With more tokens than the KV cache holds, a rollout runs fewer sequences at once, finishes, and says so."""
    engine, sampling = context.engine, SamplingParams(max_new_tokens=960)
    prompts = [[5 + index] * 32 for index in range(128)]
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("qerl.engine.vllm.engine").addHandler(handler)
    completions = engine.generate(prompts, sampling, seed=3)
    stopped = sum(completion.finish_reason == "stop" for completion in completions)
    some = completions[:16]
    trained = policy_logprobs(context.policy, prompts[:16], [completion.token_ids for completion in some])
    short = mismatch([completion.logprobs for completion in some], trained)
    tokens = sum(len(prompt) + len(c.token_ids) for prompt, c in zip(prompts, completions, strict=True))
    return {
        "cache_tokens": engine.cache_tokens,
        "tokens": tokens,
        "completions": len(completions),
        "stopped": stopped,
        "full": sum(len(c.token_ids) == sampling.max_new_tokens for c in completions),
        "warned": [message for message in messages if "KV cache" in message],
        "policy": short,
    }


def reopened(context: Context) -> dict:
    """Closed engines give their memory back, and the process can open others, as an evaluation of several bases does.

    The first is closed awake, the second asleep, then an opening fails half way, and the third is closed twice.
    """
    openings, closings = [], []
    before = context.engine.generate(context.prompts[:8], context.greedy)
    for asleep in (False, True):
        openings.append(_held())
        context.policy = None
        if asleep:
            context.engine.sleep()
        context.engine.close()
        closings.append(_held())
        refusal = _fail_half_way(context) if asleep else ""
        context.engine = context.open()
        context.policy = context.engine.policy_model()
        after = context.engine.generate(context.prompts[:8], context.greedy)
    openings.append(_held())
    context.policy = None
    context.engine.close()
    context.engine.close()
    closings.append(_held())
    return {"openings": openings, "closings": closings, "refusal": refusal, "same": same(before, after)}


def _held() -> dict:
    """What this process and the card hold: GiB, vLLM's pool for sleep by tag, and how many of vLLM's objects live."""
    from qerl.engine.vllm.worker import allocator

    pool: Counter[str] = Counter()
    for data in allocator().pointer_to_data.values():
        pool[data.tag + (" asleep" if data.is_asleep else "")] += data.handle[1]
    alive = Counter(type(thing).__name__ for thing in gc.get_objects())
    return {
        "used_gib": _used_gib(),
        "allocated_gib": torch.cuda.memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.memory_reserved() / 2**30,
        "cumem_gib": {tag: size / 2**30 for tag, size in pool.items()},
        "alive": {name: alive[name] for name in VLLM_TYPES if alive[name]},
    }


def _fail_half_way(context: Context) -> str:
    """Open an engine while the card is full: vLLM gives up after its process group and its worker have started."""
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - 2 * 2**30, dtype=torch.uint8, device="cuda")
    try:
        context.open().close()
    except EngineError as error:
        return str(error)
    finally:
        del hog
        torch.cuda.empty_cache()
    return ""
