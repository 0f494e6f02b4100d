"""The global scale as a power of two: its value, what it makes exact, and what it costs."""

import math

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from qerl.base.errors import CheckpointError
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.layout import CODE_MAX, TENSORS

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])


def normal(rows=256, columns=512, seed=0, dtype=torch.bfloat16):
    return (0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).to(dtype)


def dequantized(weight, scale, dtype=torch.float32):
    return reference.dequantize(*reference.quantize(weight, scale), dtype)


def sqnr_db(weight, scale):
    noise = weight.double() - dequantized(weight, scale).double()
    return 20 * math.log10(weight.double().norm() / noise.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("amax", "headroom_bits", "expected"),
    [
        (6.0, 0, 256.0),  # 448
        (2.625, 0, 1024.0),  # exactly 1024
        (2.640625, 0, 512.0),  # the next bfloat16: 1018
        (2.609375, 0, 1024.0),  # and the one before: 1030
        (2.625, 2, 256.0),
        (3.0e38, 0, 2.0**-117),  # 8.96e-36
        (0.0, 2, 1.0),
        (1e-37, 0, 1.0),  # 2688 / amax overflows float32
    ],
)
def test_the_scale_is_the_largest_power_of_two_that_fits(amax, headroom_bits, expected, dtype):
    scale = reference.power_of_two_scale(torch.tensor(amax, dtype=dtype), headroom_bits)
    assert (scale.dtype, tuple(scale.shape), scale.item()) == (torch.float32, (1,), expected)


def test_fused_linears_share_the_scale_of_the_largest():
    weights = [torch.full((2, 16), value) for value in (0.5, -2.0, 1.0)]
    assert reference.shared_global_scale(weights, "pow2").item() == 1024  # 1344
    assert reference.shared_global_scale(weights, "pow2", headroom_bits=3).item() == 128
    assert reference.shared_global_scale(weights).item() == 1344
    with pytest.raises(CheckpointError, match="inf or NaN"):
        reference.shared_global_scale([torch.full((2, 16), float("nan"))], "pow2")


def test_dequantized_weights_are_exact_in_bfloat16():
    weight = normal()
    pow2, amax = (reference.shared_global_scale([weight], kind) for kind in ("pow2", "amax"))
    exact = dequantized(weight, pow2)
    assert torch.equal(exact, exact.bfloat16().float())
    rounded = dequantized(weight, amax)
    assert (rounded != rounded.bfloat16().float()).float().mean() > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heavy_tails", [False, True])
def test_it_costs_no_accuracy(heavy_tails, dtype):
    weight = normal(dtype=torch.float32)
    if heavy_tails:
        torch.manual_seed(0)
        weight = 0.02 * torch.distributions.StudentT(4.0).sample((256, 512))
    weight = weight.to(dtype)
    pow2, amax = (sqnr_db(weight, reference.shared_global_scale([weight], kind)) for kind in ("pow2", "amax"))
    assert amax > 19.0
    assert pow2 == pytest.approx(amax, abs=0.05)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_head_room_changes_no_normal_weight(bits):
    weight = normal()
    plain, roomy = (reference.shared_global_scale([weight], "pow2", room) for room in (0, bits))
    assert plain.item() == roomy.item() * 2**bits
    assert torch.equal(dequantized(weight, plain), dequantized(weight, roomy))


@pytest.mark.parametrize("bits", [0, 2])
def test_head_room_is_the_factor_by_which_weights_may_grow(bits):
    weight = normal()
    weight[0, 0] = 2.625 / 16  # the scale of its block is 448 without head room
    scale = reference.shared_global_scale([weight], "pow2", bits)
    assert reference.faults(weight * 2**bits, scale)[1] == 0
    weight = weight * 2**bits
    # Up to 464 the nearest value is 448, the largest e4m3 number.
    for growth, count in ((1.03, 0), (1.05, 1), (2.0, 1)):
        grown = weight.clone()
        grown[0, 0] *= growth
        assert reference.faults(grown, scale)[1] == count


def test_the_usual_scale_saturates_nothing():
    """The scale is rounded to bfloat16, so 448 may become 449.75."""
    for seed in range(20):
        weight = normal(16, 64, seed)
        assert reference.faults(weight, reference.shared_global_scale([weight]))[1] == 0


def test_ties_are_frequent_and_go_to_the_even_code():
    """bfloat16 weights divided by a power of two: the bytes show if a kernel rounds ties otherwise."""
    weight = normal()
    scale = reference.shared_global_scale([weight], "pow2")
    packed, block_scale, _ = reference.quantize(weight, scale)
    scaled = weight.float().unflatten(1, (-1, 16)) / (block_scale.float() / scale)[..., None]
    magnitude = scaled.abs().flatten(1)
    ties = torch.isin(magnitude, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    assert ties.float().mean() > 0.005
    assert not (reference.unpack_codes(packed)[ties] & 1).any()
    assert magnitude.max() <= CODE_MAX * 17 / 16


@pytest.mark.parametrize("bits", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compressed_tensors_writes_the_same_bytes(dtype, bits):
    weight = normal(dtype=dtype)
    scale = reference.shared_global_scale([weight], "pow2", bits)
    blocks = weight.unflatten(1, (-1, 16))
    block_scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, scale)
    state = {"weight": weight, "weight_scale": block_scale.to(dtype), "weight_global_scale": scale}
    theirs = NVFP4PackedCompressor.compress(state, SCHEME)
    ours = reference.quantize(weight, scale).named()
    for name in TENSORS:
        assert torch.equal(ours[name].view(torch.uint8), theirs[name].contiguous().view(torch.uint8))
