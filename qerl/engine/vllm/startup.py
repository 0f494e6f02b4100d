"""How long the parts of an engine's start take, and which of them a second start saves. No torch, no vllm.

These are cached on disk, each under its own key: vLLM's compiled graphs (in VLLM_CACHE_ROOT; the key is made of vLLM's
version, configuration and environment variables, our adapter's rank, and the text of every traced file), the kernels
of Triton (TRITON_CACHE_DIR) and Humming (HUMMING_CACHE_DIR), and our own (QERL_CACHE).
These are not, because one process cannot hand them to another: imports, weights, the profile run, captured CUDA graphs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Parts:
    """Seconds by part, in the order in which the parts began. A part that is timed several times adds up."""

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
    """All parts, and as `rest` the seconds that none of them accounts for; rounded to 0.01 s."""
    seconds = {name: value for each in parts for name, value in each.items()}
    return {name: round(value, 2) for name, value in {**seconds, "rest": total - sum(seconds.values())}.items()}


def split_compiling(seconds: Mapping[str, float], compiling: float) -> dict[str, float]:
    """The same parts, with `compile` split off `profile`, the part in which the first forward pass compiles."""
    named = {"compile": min(compiling, seconds.get("profile", 0.0))}
    return {**seconds, **named, "profile": seconds.get("profile", 0.0) - named["compile"]}


def line(seconds: Mapping[str, float]) -> str:
    """For the log: the parts that took at least a tenth of a second."""
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.1)


def capture_sizes(max_sequences: int) -> list[int]:
    """The numbers of tokens that get a CUDA graph: about half as many as in vLLM, and the full batch of up to 512.

    A batch between two sizes takes the graph of the larger one, with at most 7 extra rows up to 48, 15 up to 256 and 63
    above. Since decoding is bound by memory, that costs a few percent. Each graph costs memory and about a tenth of a
    second of every start. There is none for 56: see `products.HUMMING_WRONG`.
    """
    sizes = {1, 2, 4, *range(8, 56, 8), *range(64, 256, 16), *range(256, 513, 64), max_sequences}
    return sorted(size for size in sizes if size <= min(2 * max_sequences, 512))
