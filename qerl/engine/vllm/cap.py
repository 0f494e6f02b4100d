"""The memory that this process may take of a card (`memory.cap_gib`), kept to by a limit of torch's allocator."""

from __future__ import annotations

from qerl.engine.own_memory import check_beside_cap, others_bytes, own_bytes


class Cap:
    """A limit in bytes for everything that this process has on the card, or none.

    From the start torch alone is kept within it. What lies outside torch's allocator (CUDA context, modules, graphs) is
    known only once vLLM is open: `count_outside_` then leaves room for it.
    """

    def __init__(self, device: int, cap_gib: float | None) -> None:
        self._device = device
        self._bytes = None if cap_gib is None else int(cap_gib * 2**30)
        self._outside = 0
        if self._bytes is not None:
            others_bytes(device)  # must first be asked while this process has nothing on the card
            self.limit_()

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self._bytes is not None

    def count_outside_(self) -> None:
        """Take off what the process holds outside torch. Raises EngineError if that leaves nothing of the cap."""
        import torch

        if self._bytes is None:
            return
        torch.cuda.synchronize(self._device)
        outside = max(0, own_bytes(self._device) - torch.cuda.memory_reserved(self._device))
        check_beside_cap(outside, self._bytes)
        self._outside = outside
        self.limit_()

    def limit_(self, released: int = 0) -> None:
        """Limit torch's allocator. `released`: bytes of a sleeping KV cache, which the allocator still counts."""
        import torch

        if self._bytes is None:
            return
        total = torch.cuda.get_device_properties(self._device).total_memory
        allowed = self._bytes - self._outside + released
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), self._device)

    def free_bytes(self) -> int:
        """What this process can still take of the card."""
        import torch

        free = torch.cuda.mem_get_info(self._device)[0]
        return free if self._bytes is None else min(free, self._bytes - own_bytes(self._device))
