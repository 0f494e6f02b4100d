"""The decode kernel against its twin in plain torch."""

import os

import pytest
import torch

from qerl.fp8 import reference
from qerl.fp8.reference import E4M3

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]  # interpreted, bfloat16 is cut off

pytestmark = pytest.mark.gpu(instead=INTERPRETED)


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def decoded(codes, scale, dtype):
    from qerl.fp8 import kernels

    return kernels.dequantize(codes, scale, dtype), reference.dequantize_unchecked(codes, scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (1, 5)], ids=str)
def test_decoding_gives_the_twin_s_bits(shape, scales, dtype):
    tensors = reference.quantize(torch.randn(shape, device=DEVICE), scales)
    assert same_bits(*decoded(*tensors, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_rows_of_a_larger_weight(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(E4M3)
    every = every[~every.isnan()].repeat(2, 1).to(DEVICE)
    assert same_bits(*decoded(every, torch.tensor([[0.75, 2.0]], device=DEVICE), dtype))
    codes, scale = reference.quantize(torch.randn(328, 256, device=DEVICE))
    assert same_bits(*decoded(codes[256:], scale[2:], dtype))
