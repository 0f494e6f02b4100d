"""Triton kernels over a chunk of logits, in two passes where torch needs six. Twin: `token_logprobs.reference_chunk`.

One program sums a whole row in a fixed order and without atomics, so results repeat to the bit. With z the logits
divided by the temperature and p = softmax(z), the first pass keeps for each row

    top = max z        log_mass = log sum exp(z - top)        so that log p = (z - top) - log_mass

as log_softmax computes it. The second pass writes the derivatives that are multiplied by the head, in its dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LANES = 1024  # running sums per row
TOGETHER = 4  # logits that a lane reads at once
BLOCK = 4096  # logits per program of `_slopes`
LOWEST = tl.constexpr(-1e30)  # below every logit, but finite, so that 0 times it is 0

# These hold one number per row. Which of them start at a multiple of 16 bytes depends on the number of rows, and
# without this Triton would compile another kernel for each case.
OF_ROWS = ["targets_ptr", "logprobs_ptr", "entropies_ptr", "tops_ptr", "log_masses_ptr"]


class Measured(NamedTuple):
    """Results of the first pass, one number per row: float32 (m,)."""

    logprobs: torch.Tensor  # of the targets
    entropies: torch.Tensor
    tops: torch.Tensor
    log_masses: torch.Tensor


@triton.jit
def _divided(logits, temperature, SCALED: tl.constexpr):
    return tl.math.div_rn(logits, temperature) if SCALED else logits


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _measure(
    logits_ptr,
    targets_ptr,
    logprobs_ptr,
    entropies_ptr,
    tops_ptr,
    log_masses_ptr,
    columns,
    temperature,
    SCALED: tl.constexpr,
    LANES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * columns
    at = tl.arange(0, LANES)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    top = tl.full((LANES,), LOWEST, tl.float32)
    mass = tl.zeros((LANES,), tl.float32)  # sum exp(z - top)
    weighted = tl.zeros((LANES,), tl.float32)  # sum (z - top) exp(z - top)
    for start in range(0, columns, LANES * TOGETHER):
        inside = start + at < columns
        z = tl.load(logits_ptr + start + at, mask=inside, other=0.0)
        z = tl.where(inside, _divided(z, temperature, SCALED), LOWEST)
        higher = tl.maximum(top, tl.max(z, 1))
        shift = top - higher
        scale = tl.exp(shift)
        z -= higher[:, None]
        p = tl.exp(z)
        weighted = (weighted + shift * mass) * scale + tl.sum(z * p, 1)
        mass = mass * scale + tl.sum(p, 1)
        top = higher
    highest = tl.max(top, 0)
    shift = top - highest
    scale = tl.exp(shift)
    total = tl.sum(mass * scale, 0)
    log_mass = tl.log(total)
    target = _divided(tl.load(logits_ptr + tl.load(targets_ptr + row)), temperature, SCALED)
    tl.store(logprobs_ptr + row, (target - highest) - log_mass)
    tl.store(entropies_ptr + row, log_mass - tl.sum((weighted + shift * mass) * scale, 0) / total)
    tl.store(tops_ptr + row, highest)
    tl.store(log_masses_ptr + row, log_mass)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _slopes(
    logits_ptr,
    targets_ptr,
    entropies_ptr,
    tops_ptr,
    log_masses_ptr,
    slope_ptr,
    entropy_slope_ptr,
    columns,
    temperature,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row.to(tl.int64) * columns + column
    z = _divided(tl.load(logits_ptr + at, mask=inside, other=0.0), temperature, SCALED)
    log_p = (z - tl.load(tops_ptr + row)) - tl.load(log_masses_ptr + row)
    p = tl.exp(log_p)
    slope = tl.where(column == tl.load(targets_ptr + row), 1.0 - p, -p)
    tl.store(slope_ptr + at, slope.to(slope_ptr.dtype.element_ty), mask=inside)
    if ENTROPY:
        slope = -p * (log_p + tl.load(entropies_ptr + row))
        tl.store(entropy_slope_ptr + at, slope.to(slope_ptr.dtype.element_ty), mask=inside)


def measure(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> Measured:
    """The first pass over logits (m, vocabulary), float32 and not yet divided by the temperature, and targets (m,)."""
    measured = Measured(*torch.empty(4, len(targets), dtype=torch.float32, device=logits.device))
    _measure[(len(targets),)](
        logits,
        targets,
        *measured,
        logits.shape[1],
        float(temperature),
        SCALED=temperature != 1.0,
        LANES=LANES,
        TOGETHER=TOGETHER,
        num_warps=8,
    )
    return measured


def slopes(
    logits: torch.Tensor,
    targets: torch.Tensor,
    measured: Measured,
    temperature: float,
    wanted: tuple[torch.dtype, bool],
) -> list[torch.Tensor]:
    """Derivatives (m, vocabulary) of the logprobs with respect to the divided logits.

    `wanted` is their dtype, and whether the derivatives of the entropies follow as a second tensor.
    """
    dtype, entropy = wanted
    rows, columns = logits.shape
    out = [torch.empty(rows, columns, dtype=dtype, device=logits.device) for _ in range(1 + entropy)]
    _slopes[(rows, triton.cdiv(columns, BLOCK))](
        logits,
        targets,
        *measured[1:],
        out[0],
        out[-1],
        columns,
        float(temperature),
        SCALED=temperature != 1.0,
        ENTROPY=entropy,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out
