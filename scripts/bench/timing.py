"""How long products take on a CUDA card: within a graph, as in decoding, and with weights that are in no cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

CACHE_BYTES = 2**28  # more than the L2 cache of any card holds
REPLAYS = 5


def cold_layers(layer_bytes: int) -> int:
    """How many layers have to take turns so that none finds its own weights in the cache."""
    return 1 + CACHE_BYTES // layer_bytes


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds that all calls take one after another in a CUDA graph: the median of REPLAYS replays."""
    calls[0]()  # compiles and loads, which must not happen during the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[REPLAYS // 2]
