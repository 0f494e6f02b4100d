"""Errors for a card whose memory runs out: vLLM names its own arguments there, ours name keys of the recipe."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qerl.base.errors import CAP_GIB, MAX_NEW_TOKENS, MEMORY, EngineError

if TYPE_CHECKING:
    from qerl.engine.vllm.opening import Settings

ADVICE = re.compile(r"[.\s]*\b(?:Try|Decrease)\b.*", re.DOTALL)  # vLLM's own advice, which names its arguments


def cannot_open(settings: Settings, error: Exception) -> EngineError:
    """The error to raise when opening vLLM raised `error`, a ValueError or torch's OutOfMemoryError."""
    text, facts = str(error).lower(), ADVICE.sub("", str(error))
    limits, keys = ("%s", (MEMORY,)) if settings.options.cap_gib is None else ("%s or %s", (MEMORY, CAP_GIB))
    if not isinstance(error, ValueError):
        return out_of_memory(f"opening {settings.base}", error)
    if "kv cache memory" in text or "cache blocks" in text:
        return EngineError(
            "of what a rollout may hold too little is left for the KV cache of one sequence of %d tokens: lower %s, or "
            f"raise {limits} (%s)",
            *(settings.model_len, MAX_NEW_TOKENS, *keys, facts),
        )
    if "free memory on device" in text:
        return EngineError(
            "less of the card is free than a rollout may hold: end what else runs there (nvidia-smi), or lower "
            f"{limits} (%s)",
            *(*keys, facts),
        )
    return EngineError(f"vLLM cannot open {settings.base}: {error}")


def out_of_memory(what: str, error: BaseException) -> EngineError:
    """The error to raise when `what` ran out of memory.

    It advises a smaller budget, because the KV cache takes all that the rollout's budget leaves.
    """
    words = (str(error).splitlines() or [type(error).__name__])[0]
    return EngineError("%s ran out of GPU memory: lower %s, or raise %s (%s)", what, MEMORY, CAP_GIB, words)
