"""Masters off the ties of rounding: they are packed to the same bits, and small updates change few of these."""

import pytest
import torch

from qerl.formats.fp8 import reference as fp8
from qerl.formats.nvfp4 import reference as nvfp4
from training.policy.weights import off_ties

ROUNDING = 1e-6  # of a weight's mean size: an update that should change next to nothing


def weights(dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(256, 512, generator=generator) * 0.02).to(dtype)


def as_nvfp4(weight):
    packed = nvfp4.quantize(weight.float(), nvfp4.power_of_two_scale(0.1, 2))
    return nvfp4.dequantize(*packed, torch.float32)


def as_fp8(weight):
    packed = fp8.quantize(weight.float())
    return fp8.dequantize(*packed, torch.float32)


def changed(weight, decoded):
    """The share of decoded values that a tiny update of random signs changes."""
    signs = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)).sign()
    other = decoded(weight.float() + ROUNDING * weight.float().abs().mean() * signs)
    return (other != decoded(weight)).float().mean().item()


@pytest.mark.parametrize("decoded", [as_nvfp4, as_fp8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_moved_master_rounds_to_the_same_bits(dtype, decoded):
    weight = weights(dtype)
    weight[0, :4] = torch.tensor([0.0, 0.03125, -0.03125, 2.0**-20])  # powers of two have a smaller unit below them
    moved = off_ties(weight, decoded(weight), 5)
    assert moved.dtype == torch.float32
    assert torch.equal(moved.to(dtype), weight)
    assert torch.equal(decoded(moved), decoded(weight))
    assert (moved != weight.float()).float().mean() > 0.9


@pytest.mark.parametrize(("seed", "decoded"), [(0, as_nvfp4), (1, as_fp8)])
def test_rows_of_very_different_sizes_keep_their_bits(seed, decoded):
    """Small rows have subnormal block scales, where the largest weight of a block may be packed below itself."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(2 * torch.randn(512, 1, generator=generator))
    weight = (0.001 * rows * torch.randn(512, 1024, generator=generator)).clamp(-0.1, 0.1).to(torch.bfloat16)
    moved = off_ties(weight, decoded(weight), seed)
    assert torch.equal(decoded(moved), decoded(weight))
    assert (moved != weight.float()).float().mean() > 0.2


@pytest.mark.parametrize("decoded", [as_nvfp4, as_fp8])
def test_a_tiny_update_changes_few_values_off_ties_and_many_on_them(decoded):
    weight = weights()
    assert changed(weight, decoded) > 0.02
    assert changed(off_ties(weight, decoded(weight), 5), decoded) < 1e-3  # FP8 tells apart weights that do not move


def test_what_has_digits_enough_or_is_exact_stays():
    weight = weights(torch.float32)
    assert torch.equal(off_ties(weight, as_nvfp4(weight), 5), weight)
    exact = as_nvfp4(weight).to(torch.bfloat16)
    assert torch.equal(off_ties(exact, exact.float(), 5), exact.float())


def test_the_moves_depend_on_the_seed_alone():
    weight = weights()
    packed = as_nvfp4(weight)
    torch.manual_seed(1)
    assert torch.equal(off_ties(weight, packed, 2**63 - 1), off_ties(weight, packed, 2**63 - 1))
    assert not torch.equal(off_ties(weight, packed, 6), off_ties(weight, packed, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_zero_keeps_its_sign(dtype):
    """A weight of -0.0 has a code of its own."""
    weight = weights(dtype)
    weight[::2, ::3] = -0.0
    weight[1::2, ::3] = 0.0
    moved = off_ties(weight, as_fp8(weight), 5)
    assert torch.equal(torch.signbit(moved), torch.signbit(weight))
    before, after = fp8.quantize(weight.float()), fp8.quantize(moved)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
