"""GPTQ's columns one after the other in Triton, the fast twin of `quantize.rounding.round_columns_`.

A program takes some rows of the weight through all columns of a block, with what is left to round in registers. In
torch each column takes about six kernels, 40 us; a 32B model has 2.8 million columns. It needs triton, so it is
imported only where a device has it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32  # of the weight, in a program
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a small float32 to an integer, ties to even


@triton.jit
def _nearest_e2m1(values):
    """See `quantize.rounding.nearest_e2m1`, whose bits it gives."""
    bounded = tl.minimum(tl.maximum(values, -8.0), 8.0)
    magnitude = tl.abs(bounded)
    step = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    rounded = (bounded / step + TO_INTEGER) - TO_INTEGER  # the steps are powers of two, so this division is exact
    return tl.minimum(tl.maximum(rounded * step, -6.0), 6.0)


@triton.jit
def _round_kernel(
    targets_ptr,
    columns_ptr,
    steps_ptr,
    shares_ptr,
    codes_ptr,
    errors_ptr,
    count,
    rows,
    shares_stride,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, COLUMNS)
    there = column < count
    left = tl.load(
        targets_ptr + column[:, None] * rows + row[None, :],
        mask=there[:, None] & inside[None, :],
        other=0.0,
    )
    for j in range(count):
        place = j * rows + row
        target = tl.sum(tl.where(column[:, None] == j, left, 0.0), axis=0)
        step = tl.load(steps_ptr + place, mask=inside, other=1.0)
        value = tl.load(columns_ptr + place, mask=inside, other=0.0)
        code = _nearest_e2m1(tl.div_rn(target, step))
        error = value - code * step
        tl.store(codes_ptr + place, code, mask=inside)
        tl.store(errors_ptr + place, error, mask=inside)
        share = tl.load(shares_ptr + j * shares_stride + column, mask=there, other=0.0)
        left += share[:, None] * error[None, :]


def round_columns_(
    targets: torch.Tensor,
    columns: torch.Tensor,
    steps: torch.Tensor,
    shares: torch.Tensor,
    codes: torch.Tensor,
    errors: torch.Tensor,
) -> None:
    """`quantize.rounding.round_columns_` on a device; `targets` keeps its values. All but `shares` are contiguous."""
    count, rows = targets.shape
    if not all(tensor.is_contiguous() for tensor in (targets, columns, steps, codes, errors)) or shares.stride(1) != 1:
        raise ValueError("the columns to round are not contiguous")
    _round_kernel[(triton.cdiv(rows, ROWS),)](
        *(targets, columns, steps, shares, codes, errors, count, rows, shares.stride(0)),
        COLUMNS=triton.next_power_of_2(count),
        ROWS=ROWS,
        num_warps=1,
    )
