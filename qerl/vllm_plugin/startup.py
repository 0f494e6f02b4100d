"""Seconds of the parts of an engine's start, and which of them a second start saves. No torch, no vllm.

Kept on disk, by their own keys: the compiled graphs (vLLM's, in VLLM_CACHE_ROOT; the key is vLLM's version,
configuration and environment variables, our rank, and the text of every traced file), the kernels of Triton
(TRITON_CACHE_DIR) and Humming (HUMMING_CACHE_DIR), ours (QERL_CACHE).
Not kept, because no process can hand it to another: imports, weights, the profile run, captured CUDA graphs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Parts:
    """Seconds by part, in the order in which they began; a part may come again, and adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - started


def whole(total: float, *parts: Mapping[str, float]) -> dict[str, float]:
    """All parts, and as `rest` what none of them accounts for; rounded to 0.01 s."""
    seconds = {name: value for each in parts for name, value in each.items()}
    return {name: round(value, 2) for name, value in {**seconds, "rest": total - sum(seconds.values())}.items()}


def split_compiling(seconds: Mapping[str, float], compiling: float) -> dict[str, float]:
    """`profile`, in which the first forward pass compiles, as `compile` and what is left of it."""
    named = {"compile": min(compiling, seconds.get("profile", 0.0))}
    return {**seconds, **named, "profile": seconds.get("profile", 0.0) - named["compile"]}


def line(seconds: Mapping[str, float]) -> str:
    """For the log: the parts that took a tenth of a second."""
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.1)


def capture_sizes(max_sequences: int) -> list[int]:
    """Numbers of tokens that get a CUDA graph: half as many as vLLM's own, and the full batch of up to 512.

    A batch between two takes the larger one's graph: at most 7 more rows to 48, 15 to 256, 63 above, for which
    decoding, bound by memory, pays a few percent. Each graph costs about a tenth of a second of every start, and
    memory. 56 has none: see `products.HUMMING_WRONG`.
    """
    sizes = {1, 2, 4, *range(8, 56, 8), *range(64, 256, 16), *range(256, 513, 64), max_sequences}
    return sorted(size for size in sizes if size <= min(2 * max_sequences, 512))
