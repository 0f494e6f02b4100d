"""Seeds for everything random in a run. A leaf module: it imports nothing of ours."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, step: int, purpose: str) -> int:
    """A 63-bit seed for one purpose at one step, so that no two uses share a stream."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
