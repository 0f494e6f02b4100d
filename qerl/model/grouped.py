"""Products of rows that are sorted by group (a group is an expert) with one matrix for each group.

torch multiplies all groups in one launch where it can (`torch.nn.functional.grouped_mm`: 16 bits on a GPU, also float32
on a CPU). Otherwise the groups are multiplied one after another. A group may be empty.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F

ALIGNED = 16  # bytes, of the rows that torch's kernel reads


def grouped_product(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x (M, K) times `matrices` (groups, K, N), (M, N) in the dtype of x; `ends` (groups,) int32 are where groups of
    rows end."""
    if _at_once(x, matrices):
        return F.grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(len(x), matrices.shape[2])
    for matrix, rows in zip(matrices, _rows(ends), strict=True):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


def grouped_outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """a^T b (groups, N, K) of each group's rows of a (M, N) and b (M, K), summed in float32 and at least that wide."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if _at_once(a, b):
        if a.dtype != wide and _sums_in_float32(a.device):
            return F.grouped_mm(a.t(), b, offs=ends, out_dtype=wide)
        return F.grouped_mm(a.t(), b, offs=ends).to(wide)
    return torch.stack([(a[rows].t() @ b[rows]).to(wide) for rows in _rows(ends)])


def _rows(ends: torch.Tensor) -> list[slice]:
    return [slice(*bounds) for bounds in pairwise([0, *ends.tolist()])]


def _at_once(*operands: torch.Tensor) -> bool:
    """Whether torch has one launch for these."""
    first = operands[0]
    if not hasattr(F, "grouped_mm") or not first.numel():
        return False
    known = (torch.bfloat16,) if first.is_cuda else (torch.bfloat16, torch.float32)
    return first.dtype in known and all(_aligned(operand) for operand in operands)


def _aligned(matrix: torch.Tensor) -> bool:
    """Whether the rows, or the columns, of a matrix are adjacent and begin at multiples of ALIGNED bytes."""
    inner, outer = sorted(matrix.stride()[-2:])
    return inner == 1 and outer * matrix.element_size() % ALIGNED == 0


@cache
def _sums_in_float32(device: torch.device) -> bool:
    """Whether torch's product of 16-bit groups can be float32, which not every version of it has on every device."""
    a, ends = torch.ones(16, 16, dtype=torch.bfloat16, device=device), torch.tensor([16])
    try:
        F.grouped_mm(a.t(), a, offs=ends.to(device, torch.int32), out_dtype=torch.float32)
    except (RuntimeError, ValueError):
        return False
    return True
