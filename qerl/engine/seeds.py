"""The seed of one prompt's random stream. It depends on the prompt's place in the batch, not on the process."""

from __future__ import annotations

SEED_STRIDE = 1_000_003  # seeds of neighbouring calls do not meet in calls of fewer prompts than this


def request_seed(seed: int | None, index: int) -> int | None:
    """The seed of the prompt at `index` of a batch whose seed is `seed`; None for a batch without one."""
    return None if seed is None else (seed * SEED_STRIDE + index) % 2**63
