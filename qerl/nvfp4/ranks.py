"""The LoRA ranks that the kernels multiply by: whole steps. No torch."""

from __future__ import annotations

RANK_STEP = 16


def padded_rank(rank: int) -> int:
    """`rank`, rounded up to whole steps; an adapter's factors are padded with zeros."""
    return -(-rank // RANK_STEP) * RANK_STEP
