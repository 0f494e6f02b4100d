"""How much of the card this process has taken, on a card that others may use as well.

The driver counts the whole card, and torch's allocator neither the context nor loaded kernels and CUDA graphs. So what
others hold is measured once, before this process has loaded anything, and subtracted from then on.
"""

from __future__ import annotations

import logging
from functools import cache

from qerl.base.errors import CAP_GIB, EngineError
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


def check_beside_cap(outside_bytes: int, cap_bytes: int) -> None:
    """Raise EngineError if what the driver counts to this process outside torch leaves nothing of its cap.

    Then another process has begun to use the card after `others_bytes` was asked.
    """
    if outside_bytes >= cap_bytes:
        raise EngineError(
            "%s is %.1f GiB, and the card has %.1f GiB more in use than when this process began: another process has "
            "taken memory meanwhile. Start again when it has all that it needs, or take another card (--gpu)",
            CAP_GIB,
            cap_bytes / GIB,
            outside_bytes / GIB,
        )
