"""Dense weights of packed linears, kept while tokens are generated one after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightCache:
    """Dense weights kept by `cached_weights`, at most `max_bytes` of them; `bytes` is what they take now."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._weights: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def get(self, linear: CachedWeight, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight, from the cache, or dequantized and kept if it still fits."""
        key = (id(linear), dtype)
        if key in self._weights:
            return self._weights[key]
        weight = linear.unpack(dtype)
        if self.max_bytes is None or self.bytes + weight.nbytes <= self.max_bytes:
            self._weights[key] = weight
            self.bytes += weight.nbytes
        return weight

    def drop(self, linear: CachedWeight) -> None:
        """Forget one linear, whose tensors change."""
        for key in [key for key in self._weights if key[0] == id(linear)]:
            self.bytes -= self._weights.pop(key).nbytes


class CachedWeight:
    """A module whose dense weight `cached_weights` can keep; `unpack` computes it."""

    cache: WeightCache | None = None  # set while inside `cached_weights`

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weight, computed anew."""
        raise NotImplementedError

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weight; fresh unless inside `cached_weights`."""
        return self.unpack(dtype) if self.cache is None else self.cache.get(self, dtype)

    def drop_cached(self) -> None:
        """Forget the dense weight of `cached_weights`: call it after the buffers were written to."""
        if self.cache is not None:
            self.cache.drop(self)


@contextmanager
def cached_weights(model: nn.Module, max_bytes: int | None = None) -> Iterator[WeightCache]:
    """Keep the dense weights of the model's packed linears and experts from their first use until the block ends.

    For token-by-token generation on a CPU, where dequantizing takes longer than multiplying. It costs the dense model
    in memory: `max_bytes` bounds that, and layers beyond it are dequantized at each call. Casting and loading inside
    the block are noticed; code that writes to the packed buffers in place has to call `drop_cached`.
    """
    cache = WeightCache(max_bytes)
    linears = [module for module in model.modules() if isinstance(module, CachedWeight)]
    before = [linear.cache for linear in linears]
    for linear in linears:
        linear.cache = cache
    try:
        yield cache
    finally:
        for linear, outer in zip(linears, before, strict=True):
            linear.cache = outer
