"""The LoRA ranks that the kernels support, which are multiples of a step. No torch."""

from __future__ import annotations

RANK_STEP = 16


def padded_rank(rank: int) -> int:
    """`rank` rounded up to a whole number of steps; the factors of an adapter are padded with zeros."""
    return -(-rank // RANK_STEP) * RANK_STEP


def padded_power(rank: int) -> int:
    """`rank` rounded up to a power of two of at least a step, as the kernels of adapters on experts need it."""
    return max(RANK_STEP, 1 << (rank - 1).bit_length())
