"""Triton kernels that draw one token per row with its logprob, reading the logits once. Twin: `draw.reference_draw`.

Each program of the first launch keeps the maximum, the sum of exponentials and the best noisy logit of its block; then
one program per row combines them. `rows` is not specialized, because an odd number of sequences would recompile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from qerl.engine.vllm.draw import BLOCK, QUARTER


def draw(
    logits: torch.Tensor,
    request: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the twin. `logits` may have any floating dtype, and any stride between its rows."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    partial = torch.empty(3, rows, blocks, dtype=torch.float32, device=logits.device)  # maximum, sum of exp, best
    best = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    common = (logits, logits.stride(0), request, temperature)
    _block_kernel[(rows, blocks)](
        *common, seeds, positions.contiguous(), partial, best, rows, vocabulary, QUARTER=QUARTER, num_warps=8
    )
    width = triton.next_power_of_2(blocks)
    _row_kernel[(rows,)](*common, partial, best, tokens, logprobs, rows, blocks, WIDTH=width, num_warps=1)
    return tokens, logprobs


@triton.jit
def _gumbel(bits):
    """Standard Gumbel noise from 32 random bits. Large values come from u near 0, where float32 has a fine grid."""
    bits = bits.to(tl.int32, bitcast=True)
    uniform = tl.where(bits < 0, -bits - 1, bits).to(tl.float32) * 4.6566127342e-10
    return -tl.log(-libdevice.log1p(-tl.maximum(uniform, 4.6566127342e-10)))


@triton.jit(do_not_specialize=["rows"])
def _block_kernel(
    logits_ptr,
    stride,
    request_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    partial_ptr,
    best_ptr,
    rows,
    vocabulary,
    QUARTER: tl.constexpr,
):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    request = tl.load(request_ptr + row)
    temperature = tl.load(temperature_ptr + request)
    inverse = tl.where(temperature == 0.0, 1.0, 1.0 / temperature)
    seed = tl.randint(tl.load(seeds_ptr + request), tl.load(positions_ptr + row))
    lane = tl.arange(0, QUARTER)
    r0, r1, r2, r3 = tl.randint4x(seed, block * QUARTER + lane)
    maximum = float("-inf")
    total = 0.0
    best_value = float("-inf")
    best_index = 0
    for part in tl.static_range(4):
        index = block * (4 * QUARTER) + part * QUARTER + lane
        logits = tl.load(logits_ptr + row * stride + index, mask=index < vocabulary, other=float("-inf"))
        logits = logits.to(tl.float32) * inverse
        here = tl.maximum(maximum, tl.max(logits))
        safe = tl.where(here == float("-inf"), 0.0, here)
        total = total * tl.exp(maximum - safe) + tl.sum(tl.exp(logits - safe))
        maximum = here
        noise = _gumbel(r0 if part == 0 else r1 if part == 1 else r2 if part == 2 else r3)
        noisy = tl.where(temperature == 0.0, logits, logits + noise)
        value, where = tl.max(noisy, axis=0, return_indices=True)
        better = value > best_value
        best_index = tl.where(better, block * (4 * QUARTER) + part * QUARTER + where, best_index)
        best_value = tl.where(better, value, best_value)
    place = row * blocks + block
    tl.store(partial_ptr + place, maximum)
    tl.store(partial_ptr + rows * blocks + place, total)
    tl.store(partial_ptr + 2 * rows * blocks + place, best_value)
    tl.store(best_ptr + place, best_index)


@triton.jit(do_not_specialize=["rows"])
def _row_kernel(
    logits_ptr,
    stride,
    request_ptr,
    temperature_ptr,
    partial_ptr,
    best_ptr,
    tokens_ptr,
    logprobs_ptr,
    rows,
    blocks,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    place, inside = row * blocks + lane, lane < blocks
    maxima = tl.load(partial_ptr + place, mask=inside, other=float("-inf"))
    totals = tl.load(partial_ptr + rows * blocks + place, mask=inside, other=0.0)
    values = tl.load(partial_ptr + 2 * rows * blocks + place, mask=inside, other=float("-inf"))
    maximum = tl.max(maxima)
    log_total = maximum + tl.log(tl.sum(tl.where(totals > 0, totals * tl.exp(maxima - maximum), 0.0)))
    _, where = tl.max(values, axis=0, return_indices=True)
    token = tl.load(best_ptr + row * blocks + where)
    temperature = tl.load(temperature_ptr + tl.load(request_ptr + row))
    inverse = tl.where(temperature == 0.0, 1.0, 1.0 / temperature)
    logit = tl.load(logits_ptr + row * stride + token).to(tl.float32) * inverse
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, logit - log_total)
