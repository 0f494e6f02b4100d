"""How much of the card this process has taken and may take, on a card that others may use as well.

The driver counts the whole card, and torch's allocator neither the context nor loaded kernels and CUDA graphs. So what
others hold is measured once, before this process has loaded anything, and subtracted from then on. The process keeps to
`memory.cap_gib` by a limit of torch's allocator. Importing this loads no torch.
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from qerl.base.errors import CAP_GIB, MEMORY, EngineError
from qerl.plan.engine_memory import GIB

CONTEXT_BYTES = 3 * GIB // 4  # a CUDA context with torch's kernels takes less: 0.4 to 0.6 GiB

logger = logging.getLogger(__name__)


def of_others(used: int, reserved: int) -> int:
    """Bytes that others hold, where the driver counts `used` and torch has `reserved`; never too many."""
    return max(0, used - reserved - CONTEXT_BYTES)


@cache
def others_bytes(device: int) -> int:
    """What other processes held when this was first called: call it before anything is loaded."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    others = of_others(total - free, torch.cuda.memory_reserved(device))
    if others > GIB // 4:
        logger.info("other processes hold %.1f GiB of the card", others / GIB)
    return others


def own_bytes(device: int) -> int:
    """What the driver says is taken on the card, less what others held at first."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - others_bytes(device))


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
        if outside >= self._bytes:  # another process has begun to use the card after `others_bytes` was asked
            raise EngineError(
                "%s is %.1f GiB, and the card has %.1f GiB more in use than when this process began: another process "
                "has taken memory meanwhile. Start again when it has all that it needs, or take another card (--gpu)",
                *(CAP_GIB, self._bytes / GIB, outside / GIB),
            )
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


def out_of_memory(what: str, error: BaseException) -> EngineError:
    """The error to raise when `what` ran out of memory.

    It advises a smaller budget, because the KV cache takes all that the rollout's budget leaves.
    """
    words = (str(error).splitlines() or [type(error).__name__])[0]
    return EngineError("%s ran out of GPU memory: lower %s, or raise %s (%s)", what, MEMORY, CAP_GIB, words)


def outgrown(lengths: Sequence[int], at_once: int, cache_tokens: int) -> tuple[Any, ...] | None:
    """A warning and its values, for sequences (or conversations, after their last turn) of so many tokens; None if the
    longest that run `at_once` fit into `cache_tokens`."""
    needed = sum(sorted(lengths)[-at_once:])
    if needed <= cache_tokens:
        return None
    return (
        "the KV cache holds %d tokens and the rollout's longest %d sequences have %d (prompts counted for each): fewer "
        "ran at once, and some may have been computed twice. For speed raise %s or %s, or sample fewer completions at "
        "once",
        cache_tokens,
        min(len(lengths), at_once),
        needed,
        MEMORY,
        CAP_GIB,
    )
