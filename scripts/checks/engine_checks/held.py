"""What still takes memory and what refers to it: the card's use in parts, the largest tensors, vLLM's objects."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

GIB, MIB = 2**30, 2**20
LARGEST = 10
HOLDERS = 4  # how many types of holders are listed for an object
VLLM_TYPES = (
    "LLM",
    "LLMEngine",
    "EngineCore",
    "UniProcExecutor",
    "QerlWorker",
    "GPUModelRunner",
    "CUDAGraph",
    "CUDAGraphWrapper",
    "AdapterLinearMethod",
    "CompiledFxGraph",
)


def report() -> dict:
    """The present state of this process and card, in GiB.

    `outside_torch` is memory of the CUDA context, kernels, CUDA graphs and other processes.
    """
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "used_gib": (total - free) / GIB,
        "allocated_gib": torch.cuda.memory_allocated() / GIB,
        "reserved_gib": reserved / GIB,
        "outside_torch_gib": (total - free - reserved) / GIB,
        "pools": pools(torch.cuda.memory_snapshot()),
        "cumem_gib": _cumem_gib(),
        "largest": largest("cuda"),
        "alive": alive(VLLM_TYPES),
    }


def pools(segments: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """MiB by pool of torch, from `torch.cuda.memory_snapshot`.

    (0, 0) is the ordinary pool; others belong to CUDA graphs or the KV cache.
    """
    sums: dict[str, dict[str, float]] = {}
    for segment in segments:
        pool = sums.setdefault(str(tuple(segment.get("segment_pool_id", (0, 0)))), {"reserved": 0.0, "allocated": 0.0})
        pool["reserved"] += segment["total_size"] / MIB
        pool["allocated"] += segment["allocated_size"] / MIB
    return sums


def _cumem_gib() -> dict[str, float]:
    """The sizes in vLLM's pool for sleep, by tag. Entries that are asleep take no memory."""
    from qerl.engine.vllm.worker import allocator

    sums: Counter[str] = Counter()
    for data in allocator().pointer_to_data.values():
        sums[data.tag + (" asleep" if data.is_asleep else "")] += data.handle[1]
    return {tag: size / GIB for tag, size in sums.items()}


def largest(device_type: str, count: int = LARGEST) -> list[dict[str, Any]]:
    """The largest storages that Python tensors refer to, with one tensor of each and its holders."""
    by_storage: dict[int, torch.Tensor] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device_type and _has_memory(thing):
            by_storage.setdefault(thing.untyped_storage().data_ptr(), thing)
    tensors = sorted(by_storage.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())[:count]
    by_storage.clear()
    return [
        {
            "mib": round(tensor.untyped_storage().nbytes() / MIB, 3),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "held_by": holders(tensor, [tensors]),
        }
        for tensor in tensors
    ]


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for the compiler's leftovers of tracing, which have a device but no data."""
    if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return False
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper around a traced tensor
        return False


def alive(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """How many objects of the types with these names are alive, and what holds the first of each."""
    found: dict[str, list[object]] = {}
    for thing in gc.get_objects():
        if (name := type(thing).__name__) in names:
            found.setdefault(name, []).append(thing)
    return {
        name: {"count": len(things), "held_by": holders(things[0], [things])} for name, things in sorted(found.items())
    }


def holders(thing: object, ours: list[object]) -> list[str]:
    """The types that refer to `thing`, with the names under which they do so; `ours` are containers of this report."""
    skipped = {id(one) for one in ours} | {id(ours)}
    names = Counter(
        _name(holder, thing)
        for holder in gc.get_referrers(thing)
        if id(holder) not in skipped and not _is_frame_here(holder)
    )
    return [f"{name} x{times}" if times > 1 else name for name, times in names.most_common(HOLDERS)]


def _name(holder: object, thing: object) -> str:
    """`Owner.attribute` for an object's attributes, `Owner[key or type]` for other containers, otherwise the type."""
    if isinstance(holder, dict):
        keys = [str(key) for key, value in holder.items() if value is thing]
        owners = [one for one in gc.get_referrers(holder) if getattr(one, "__dict__", None) is holder]
        if owners:
            return f"{_type(owners[0])}.{keys[0] if keys else '?'}"
        return f"{holder.get('__name__', _above(holder))}[{keys[0] if keys else '?'}]"
    if isinstance(holder, (list, tuple, set, frozenset)):
        return f"{_above(holder)}[{_type(holder)}]"
    return _type(holder)


def _above(container: object) -> str:
    above = [one for one in gc.get_referrers(container) if not _is_frame_here(one)]
    kinds = Counter(_type(one) for one in above)
    return "+".join(kind for kind, _ in kinds.most_common(2)) or "nothing"


def _type(thing: object) -> str:
    kind = type(thing)
    if kind.__name__ == "frame":
        return f"frame of {thing.f_code.co_qualname}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_frame_here(thing: object) -> bool:
    return type(thing).__name__ == "frame" and thing.f_code.co_filename == __file__
