"""Triton kernel that rounds float32 to bfloat16 at random, in one pass. Twin: `rounding.reference_round_randomly_`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from training.policy.rounding import BLOCK, EXPONENT, LANES, QUIET


@triton.jit(do_not_specialize=["seed"])
def _round_randomly(
    value_ptr, target_ptr, count, seed, LANES: tl.constexpr, EXPONENT: tl.constexpr, QUIET: tl.constexpr
):
    block, lane = tl.program_id(0), tl.arange(0, LANES)
    first, second, third, fourth = tl.randint4x(seed, block * LANES + lane)
    for half in tl.static_range(8):
        at = block.to(tl.int64) * (8 * LANES) + half * LANES + lane
        inside = at < count
        bits = tl.load(value_ptr + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        word = first if half // 2 == 0 else second if half // 2 == 1 else third if half // 2 == 2 else fourth
        dropped = (word >> (16 * (half % 2))).to(tl.int32) & 0xFFFF
        nan = (bits & 0x7FFFFFFF) > EXPONENT
        up = tl.where((bits & EXPONENT) == EXPONENT, tl.where(nan, bits | QUIET, bits), bits + dropped)
        tl.store(target_ptr + at, (up >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)


def round_randomly_(target: torch.Tensor, value: torch.Tensor, seed: int) -> None:
    """See `rounding.round_randomly_`."""
    if not (target.is_contiguous() and value.is_contiguous()):
        raise ValueError("the kernel goes through memory in order: both tensors have to be contiguous")
    count = value.numel()
    with torch.cuda.device_of(value):
        _round_randomly[(triton.cdiv(count, BLOCK),)](
            value, target, count, seed, LANES=LANES, EXPONENT=EXPONENT, QUIET=QUIET, num_warps=8
        )
