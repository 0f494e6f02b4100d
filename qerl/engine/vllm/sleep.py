"""A sleep mode that frees the KV cache and nothing else.

vLLM's own level 1 moves the weights to the host and back, and its level 2 drops them; ours have to stay, because the
trainer uses them as well. Addresses do not change, so the CUDA graphs stay valid. Remove when vLLM's sleep takes tags.
"""

from __future__ import annotations

import atexit

from vllm.device_allocator import HandleType
from vllm.device_allocator.cumem import CuMemAllocator, create_and_map, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

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
