"""The adapter's factors as the products read them: in their dtype, stacked; made once between two updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Factors = Sequence[torch.Tensor]


class _Kept:
    """Shared by all threads: the backward pass runs in one of autograd's. None: nothing is kept."""

    values: dict[tuple, tuple[Factors, torch.Tensor]] | None = None


@contextmanager
def kept_factors() -> Iterator[None]:
    """Inside, what is made of the factors is kept: 2 bytes a trained parameter in 16 bit."""
    before, _Kept.values = _Kept.values, {}
    try:
        yield
    finally:
        _Kept.values = before


def cast(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The factor in `dtype`."""
    return factor if factor.dtype == dtype else _made(("cast", dtype), (factor,), lambda: factor.to(dtype))


def stacked(factors: Factors, dtype: torch.dtype) -> torch.Tensor:
    """A (ranks, K) of the A_i (r_i, K), or a bias of several: one below the other."""
    if len(factors) == 1:
        return cast(factors[0], dtype)
    return _made(("stacked", dtype), factors, lambda: torch.cat([factor.to(dtype) for factor in factors]))


def diagonal(factors: Factors, dtype: torch.dtype) -> torch.Tensor:
    """(ranks, N), with the B_i^T (r_i, N_i) of the B_i on its diagonal and 0 elsewhere."""
    return _made(("diagonal", dtype), factors, lambda: torch.block_diag(*(factor.to(dtype) for factor in factors)).t())


def _made(kind: tuple, factors: Factors, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    if _Kept.values is None:
        return make()
    key = (*kind, *((id(factor), factor._version) for factor in factors))  # the entry holds them: ids stay theirs
    if key not in _Kept.values:
        _Kept.values[key] = factors, make()
    return _Kept.values[key][1]
