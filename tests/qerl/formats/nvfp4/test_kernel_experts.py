"""Experts in Marlin's layout decode to the bits of their checkpoint; a card reads the same bits.

Last run on an H200 on 2026-11-23.
"""

import os

import pytest
import torch

from qerl.formats.nvfp4.linear import expected_shapes, marlin_takes
from tests.helpers.marlin import marlin_experts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPE = (3, 128, 64)


@pytest.fixture(scope="module")
def packed():
    """Three experts whose weights differ by orders of magnitude, and so do their global scales."""
    size = torch.tensor([1.0, 0.01, 37.0])[:, None, None]
    matrices = size * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return marlin_experts(matrices, spread=1.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_expert_decodes_with_its_own_global_scale(packed, dtype):
    experts, decoded = packed
    assert len(set(experts.global_scale.tolist())) == 3
    assert torch.equal(experts.dense(dtype), decoded.to(dtype))
    assert tuple(map(tuple, (experts.words.shape, experts.scales.shape))) == expected_shapes(SHAPE)


def test_casting_and_moving_leave_the_engines_tensors_alone(packed):
    experts, _ = packed
    words = experts.words
    experts.float().to("meta")
    assert experts.words is words
    assert experts.compute_dtype == torch.bfloat16


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float32], ids=str)
def test_a_card_decodes_the_same_bits(packed, dtype):
    """With `TRITON_INTERPRET=1 pytest -m gpu` it runs on a CPU."""
    from qerl.formats.nvfp4.kernels import dequantize_experts_
    from qerl.formats.nvfp4.linear import KernelExperts

    experts, decoded = packed
    there = (each.to(DEVICE) for each in (experts.words, experts.scales))
    moved = KernelExperts(*there, SHAPE, experts.global_scale.to(DEVICE), experts.scale_factor)
    out = dequantize_experts_(torch.empty(SHAPE, dtype=dtype, device=DEVICE), moved)
    assert torch.equal(out.cpu(), decoded.to(dtype))


@pytest.mark.parametrize(
    ("hidden", "width", "fits"),
    [(2048, 768, True), (128, 64, True), (64, 128, True), (64, 64, False), (128, 96, False), (96, 128, False)],
)
def test_the_sizes_that_marlin_takes_without_padding(hidden, width, fits):
    assert marlin_takes(hidden, width) is fits
