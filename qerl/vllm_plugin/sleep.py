"""A sleep mode that gives back the KV cache and nothing else.

vLLM's own level 1 moves the weights to the host and back, its level 2 drops them; ours are the trainer's as well and
stay. Addresses do not change, so the CUDA graphs stay valid. Remove when vLLM's sleep takes tags.
"""

from __future__ import annotations

import atexit

from vllm.device_allocator import HandleType
from vllm.device_allocator.cumem import CuMemAllocator, create_and_map, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

KV_CACHE = "kv_cache"  # the tag under which vLLM allocates it
CLOSED = "closed"  # and that of a closed engine's


class KVCacheAllocator(CuMemAllocator):
    """vLLM's, which also frees what sleeps.

    vLLM's C code unmaps what it frees. If it sleeps and so is unmapped, that fails, and the error stays set in a
    variable that makes the next allocation fail: that of the next engine (csrc/cumem_allocator.cpp, `error_code`; for
    ROCm vLLM guards against it). So it is mapped again just before. Remove when vLLM's CUDA path has its own guard.
    """

    def _python_free_callback(self, ptr: int) -> HandleType:
        data = self.pointer_to_data[ptr]
        if data.is_asleep:
            create_and_map(data.handle)
            data.is_asleep = False
        return super()._python_free_callback(ptr)


def allocator() -> CuMemAllocator:
    """The process's, ours unless something else has used vLLM's before."""
    if CuMemAllocator.instance is None:
        CuMemAllocator.instance = KVCacheAllocator()
        atexit.register(CuMemAllocator._shutdown_singleton)
    return CuMemAllocator.get_instance()


class KVCacheBackend(SleepModeBackend):
    """Registered as `qerl_kv`."""

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
    """What `suspend` gives back."""
    return sum(d.handle[1] for d in allocator().pointer_to_data.values() if d.tag == KV_CACHE)


def give_back_closed() -> int:
    """Give back, for good, what of a closed engine's KV cache something still refers to: bytes."""
    rest = [data for data in allocator().pointer_to_data.values() if data.tag == KV_CACHE]
    for data in rest:
        if not data.is_asleep:
            unmap_and_release(data.handle)
            data.is_asleep = True
        data.tag = CLOSED
    return sum(data.handle[1] for data in rest)
