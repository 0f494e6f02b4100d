"""The sum over a token's experts in Triton; the twin is in `qerl.model.routing`.

In plain torch each of a token's experts costs a gather and a pass over the float32 total. Here its rows are read once
and the total is written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # per program


@triton.jit
def _sum_kernel(
    out_ptr,
    rows_ptr,
    row_ptr,
    weights_ptr,
    columns,
    CHOSEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOSEN):
        row = tl.load(row_ptr + token * CHOSEN + choice)
        own = tl.load(rows_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            own *= tl.load(weights_ptr + token * CHOSEN + choice)
        total += own
    tl.store(out_ptr + token * columns + column, total, mask=inside)


def sum_of_rows(rows: torch.Tensor, row: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """float32 (T, n): the sum of each token's rows of `rows` (M, n), in float32 or 16 bits, times `weights`.

    `row` is int64 (T, k), `weights` float32 (T, k). The choices are added in their order.
    """
    (tokens, chosen), columns = row.shape, rows.shape[1]
    out = torch.empty(tokens, columns, dtype=torch.float32, device=rows.device)
    block = min(COLUMNS, triton.next_power_of_2(columns))
    if out.numel():
        held = None if weights is None else weights.contiguous()
        _sum_kernel[(tokens, triton.cdiv(columns, block))](
            *(out, rows.contiguous(), row.contiguous(), held, columns),
            CHOSEN=chosen,
            WEIGHTED=weights is not None,
            BLOCK=block,
        )
    return out
