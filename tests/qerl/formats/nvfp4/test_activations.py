"""Rounding of activations in plain torch against compressed-tensors' own, bit by bit, and against values by hand."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from qerl.formats.nvfp4.activations import Activations, row_scales

SCHEME = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def by_compressed_tensors(x, global_scale):
    """What a linear of the scheme NVFP4 multiplies by there."""
    module = torch.nn.Module()
    module.quantization_status = QuantizationStatus.COMPRESSED
    module.input_global_scale = torch.tensor([global_scale])
    return forward_quantize(module, x, "input", SCHEME)


def awkward(dtype):
    """Rows as activations have them: normal ones, outliers, ties, blocks of zeros, and sizes far apart."""
    x = torch.randn(12, 160)
    x[1] *= 2.0 ** torch.randint(-20, 8, (10,)).repeat_interleave(16)
    x[2, 5], x[3, :48], x[4], x[5] = 5000.0, 0.0, -0.0, x[5] * 1e-9
    x[6] = torch.randint(-24, 25, (160,)) / 4
    return x.to(dtype)


@DTYPES
@pytest.mark.usefixtures("fresh_seed")
def test_static_is_what_compressed_tensors_computes(dtype):
    x = awkward(dtype)
    for scale in (1.0, 0.5, 2688 / 7.3, 2688 / 5000.0):
        scale = torch.tensor(scale).item()
        assert torch.equal(Activations(scale)(x), by_compressed_tensors(x, scale))


@DTYPES
@pytest.mark.usefixtures("fresh_seed")
def test_dynamic_is_the_same_row_by_row_with_the_scale_of_the_row(dtype):
    x = awkward(dtype)
    scales = row_scales(x.unflatten(-1, (-1, 16)))
    expected = [by_compressed_tensors(row, scale) for row, scale in zip(x.split(1), scales[:, 0].tolist(), strict=True)]
    rounded = Activations()(x)
    assert torch.equal(rounded, torch.cat(expected))
    assert torch.equal(Activations()(x[3:5].view(2, 1, -1)), rounded[3:5].view(2, 1, -1))  # whatever else is in a batch


@pytest.mark.parametrize(("amax", "exponent"), [(1.0, 10), (1.99, 10), (2.0, 9), (0.5, 11), (5000.0, -2), (0.0, 73)])
def test_the_scale_of_a_row_by_hand(amax, exponent):
    blocks = torch.zeros(2, 16)
    blocks[1, 3] = -amax
    assert row_scales(blocks).item() == 2.0**exponent


def test_rounding_a_row_by_hand():
    """The largest is 12: g = 2^7, block scales 12 / 6 * 128 = 256 and 0.6 / 6 * 128 = 12.8, which becomes 13."""
    x = torch.tensor([12.0, -7.1, 1.1, -0.4, *[0.0] * 12, 0.6, -0.3, 0.26, *[0.0] * 13])
    step = 13 / 128
    expected = [12.0, -8.0, 1.0, -0.0, *[0.0] * 12, 6 * step, -3 * step, 3 * step, *[0.0] * 13]
    rounded = Activations()(x)
    assert rounded.tolist() == expected
    assert rounded.signbit()[:5].tolist() == [False, True, False, True, False]


@DTYPES
@pytest.mark.parametrize("scale", [None, 3.7])
def test_a_block_with_inf_or_nan_becomes_nan_and_the_rest_of_the_row_does_not_see_it(dtype, scale):
    x = torch.randn(2, 64, dtype=dtype)
    x[0, 16:32] = 0.0
    without = Activations(scale)(x)
    x[0, 20], x[1, 63] = float("inf"), float("nan")
    rounded = Activations(scale)(x)
    without[0, 16:32], without[1, 48:] = torch.nan, torch.nan
    assert torch.equal(rounded[0].isnan(), without[0].isnan())
    assert torch.equal(rounded[0].nan_to_num(9.0), without[0].nan_to_num(9.0))
    assert torch.equal(rounded[1].isnan(), without[1].isnan())
