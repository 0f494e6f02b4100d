"""Whether a rollout outgrew the KV cache: then vLLM evicts sequences and computes them again. Pure numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qerl.base.errors import CAP_GIB, MEMORY


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
