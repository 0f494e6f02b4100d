"""The adapter's factors in the form the products read: cast and stacked, and made only once between two updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Factors = Sequence[torch.Tensor]


class _Cache:
    """Shared by all threads, because the backward pass runs in one of autograd's. None: nothing is kept."""

    values: dict[tuple, tuple[Factors, torch.Tensor]] | None = None


@contextmanager
def kept_factors() -> Iterator[None]:
    """Within this context, cast and stacked factors are kept: 2 bytes per trained parameter in 16 bits."""
    before, _Cache.values = _Cache.values, {}
    try:
        yield
    finally:
        _Cache.values = before


def cast(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The factor in `dtype`."""
    return factor if factor.dtype == dtype else _cached(("cast", dtype), (factor,), lambda: factor.to(dtype))


def stacked(factors: Factors, dtype: torch.dtype) -> torch.Tensor:
    """Concatenate along the first dimension: the A_i (r_i, K) to one A (ranks, K), or the biases of several linears."""
    if len(factors) == 1:
        return cast(factors[0], dtype)
    return _cached(("stacked", dtype), factors, lambda: torch.cat([factor.to(dtype) for factor in factors]))


def diagonal(factors: Factors, dtype: torch.dtype) -> torch.Tensor:
    """A (ranks, N) matrix with the blocks B_i^T (r_i, N_i) on its diagonal and 0 elsewhere."""
    return _cached(
        ("diagonal", dtype), factors, lambda: torch.block_diag(*(factor.to(dtype) for factor in factors)).t()
    )


def beside(frozen: torch.Tensor, factor: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """[B0, s B] (N, r0 + r) of a frozen B0 (N, r0) and a trained B (N, r), as an engine has them in its buffers."""
    return _cached(
        ("beside", scale, dtype), (frozen, factor), lambda: torch.cat([frozen.to(dtype), (factor * scale).to(dtype)], 1)
    )


def _cached(kind: tuple, factors: Factors, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    if _Cache.values is None:
        return make()
    # The entry holds the factors themselves, so their ids cannot be reused by other tensors.
    key = (*kind, *((id(factor), factor._version) for factor in factors))
    if key not in _Cache.values:
        _Cache.values[key] = factors, make()
    return _Cache.values[key][1]
