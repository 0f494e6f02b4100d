"""The low-rank part of a quantization error that matters most to the outputs, as the factors of a LoRA adapter.

For an error E = W - Q (out, in) and the second moment R (in, in) of the inputs, the best BA of a rank minimizes
tr((E - BA) R (E - BA)'). With any S S' = R that is |(E - BA) S|^2, so by Eckart and Young BA S = U U' E S, where U has
the first left singular vectors of E S, which are the first eigenvectors of E R E'. Hence B = U, A = U' E: this needs no
root and no inverse of R, and a singular R is no special case. Sorted by eigenvalue, the first k columns of B and rows
of A are the best of rank k. The same optimum, by a root of R: QERA (arXiv 2410.06040), EoRA (arXiv 2410.21271).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch

from quantize.rounding import SMALL, one_thread

EXTRA = 16  # columns beside those of the rank, which make the iteration converge
ROUNDS = 4
SEED = 0


class Factors(NamedTuple):
    """A (rank, in) and B (out, rank) in one dtype."""

    a: torch.Tensor
    b: torch.Tensor

    def prefix(self, rank: int) -> Factors:
        """The factors of a smaller rank."""
        return Factors(self.a[:rank], self.b[:, :rank])


def best_factors(error: torch.Tensor, moment: torch.Tensor, rank: int) -> Factors:
    """The best factors of `error` (out, in) under `moment` (in, in), balanced; all in float32.

    `rank` is at most the smaller side of the error. Subspace iteration finds the eigenvectors of E R E', which is never
    formed; after four rounds the error that is left is the least one to within a thousandth.
    """
    columns = min(rank + EXTRA, len(error))
    generator = torch.Generator().manual_seed(SEED)
    with one_thread(error.device) if error.numel() <= SMALL else nullcontext():
        basis = torch.randn(len(error), columns, generator=generator).to(error.device)
        for _ in range(ROUNDS):
            basis = torch.linalg.qr(error @ (moment @ (error.T @ basis)))[0]
        inside = basis.T @ error
        _, vectors = torch.linalg.eigh((inside @ moment @ inside.T).to(torch.float64))  # in ascending order
        b = basis @ vectors[:, -rank:].flip(1).to(torch.float32)
        return balanced(Factors(b.T @ error, b))


def balanced(factors: Factors) -> Factors:
    """The same product from a column of B and a row of A that are equally long, each pair for itself."""
    a, b = factors
    gain = (a.norm(dim=1) / b.norm(dim=0)).sqrt()
    gain = gain.where(gain.isfinite() & (gain > 0), 1.0)
    return Factors(a / gain[:, None], b * gain)


def rate_ratio(factors: Factors, moment: torch.Tensor) -> float | None:
    """How much further one step of Adam moves a linear's outputs from these factors than from a fresh pair.

    A step moves each element of A and B by the learning rate, with signs as good as random. The mean square change of
    an output is then out tr(A R A') + tr(B'B) tr R, times its square; for a fresh pair of LoRA, whose B is zero and
    whose A is uniform, it is out rank tr R / (3 in). The ratio of the roots says by what a learning rate that suits a
    fresh pair is to be divided. None for inputs that are zero throughout.
    """
    a, b = (factor.to(torch.float32) for factor in factors)
    (rank, width), out = a.shape, len(b)
    power = moment.diagonal().sum()
    fresh = out * rank * power / (3 * width)
    if not float(fresh) > 0:
        return None
    moved = out * ((a @ moment) * a).sum() + b.square().sum() * power
    return float((moved / fresh).sqrt())
