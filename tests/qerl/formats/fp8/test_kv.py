"""Keys and values in 8 bits."""

import pytest
import torch

from qerl.formats.fp8.kv import decode, encode, rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_the_nearest_values_with_ties_to_even_and_saturate(dtype):
    """Beside 1 the values of e4m3 are 1/8 apart above and 1/16 below."""
    x = torch.tensor([0.0, -0.0, 1.0, 1.0625, 1.1875, 1.07, 448.0, 460.0, 1e6, -1e6, 2.0**-10, 2.0**-9], dtype=dtype)
    wanted = [0.0, -0.0, 1.0, 1.0, 1.25, 1.125, 448.0, 448.0, 448.0, -448.0, 0.0, 2.0**-9]
    for scale in (1.0, 0.25, 2.0**-7, 32.0):
        found = decode(encode(x * scale, scale), scale, dtype)
        assert found.dtype == dtype
        assert (found / scale).tolist() == wanted
        assert found.signbit().tolist() == x.signbit().tolist()


def test_all_codes_stand_for_their_values_and_keep_their_bits():
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes, 2.0**-3, torch.float32)
    assert torch.equal(values.nan_to_num(7.0), (codes.view(torch.float8_e4m3fn).float() / 8).nan_to_num(7.0))
    finite = ~values.isnan()
    assert finite.sum() == 254
    assert torch.equal(encode(values[finite], 2.0**-3).view(torch.uint8), codes[finite])
    assert encode(torch.tensor([float("nan")]), 1.0).float().isnan().all()


def test_the_gradient_is_that_of_the_identity_also_beyond_the_largest_value():
    x = torch.tensor([0.3, -900.0, 1.06], requires_grad=True)
    y = rounded(x, 1.0)
    y.backward(torch.tensor([2.0, 3.0, 5.0]))
    assert y.tolist() == [0.3125, -448.0, 1.0]
    assert x.grad.tolist() == [2.0, 3.0, 5.0]
