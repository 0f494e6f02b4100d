"""The LoRA ranks that the kernels support, which are multiples of a step. No torch."""

from __future__ import annotations

RANK_STEP = 16


def padded_rank(rank: int) -> int:
    """`rank` rounded up to a whole number of steps; the factors of an adapter are padded with zeros."""
    return -(-rank // RANK_STEP) * RANK_STEP
