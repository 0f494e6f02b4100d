"""The weight that a linear has with a LoRA in it, W0 + s B A, which is computed when it is asked for.

The sum is taken in float64 and rounded once, to float32. So it does not depend on the device, on the library, or on how
many rows are computed at once: the bytes that are packed of it on a card are those that an export packs on a CPU. A
piece of the rows is computed at a time, and W0, which may lie in host memory, is never copied to the device as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

PIECE = 2**22  # weights that are added up at once: 32 MiB in float64
ROWS = 128  # a piece has a multiple of this many rows: a block of FP8, and 8 slabs of the kernel that packs NVFP4


@dataclass(frozen=True, eq=False)
class LowRankSum:
    """W0 (out, in) in any float dtype on any device, A (r, in) and B (out, r), and the scale s."""

    start: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def shape(self) -> torch.Size:
        return self.start.shape

    def detach(self) -> LowRankSum:
        """The same without a graph, as tensors have it."""
        return LowRankSum(self.start, self.a.detach(), self.b.detach(), self.scaling)

    def pieces(self, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, W0 + s B A of the rows from there on), float32 on `device`, from the first row to the last."""
        a, b = (factor.detach().to(device, torch.float64) for factor in (self.a, self.b))
        step = max(ROWS, PIECE // self.shape[1] // ROWS * ROWS)
        for first in range(0, self.shape[0], step):
            rows = slice(first, first + step)
            start = self.start[rows].to(device, non_blocking=True).double()
            yield first, torch.addmm(start, b[rows], a, alpha=self.scaling).float()

    def dense(self, device: torch.device) -> torch.Tensor:
        """The whole matrix, float32 on `device`."""
        return torch.cat([rows for _, rows in self.pieces(device)])


def pieces_of(matrix: torch.Tensor | LowRankSum, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) of a matrix on `device`; a tensor is one piece."""
    if isinstance(matrix, LowRankSum):
        yield from matrix.pieces(device)
    else:
        yield 0, matrix.to(device)
