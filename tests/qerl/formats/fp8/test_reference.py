"""The FP8 arithmetic against vLLM's formulas, hand values, and compressed-tensors."""

import math

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import dequantize as ct_dequantize

from qerl.base.errors import CheckpointError
from qerl.formats.fp8 import layout, reference
from qerl.formats.fp8.reference import E4M3, FP8Tensor

SCHEME = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
SHAPES = [(128, 128), (256, 384), (200, 300), (1, 5), (129, 127)]


def per_block_cast_to_fp8(x, use_ue8m0):
    """vLLM 0.25.1, vllm/utils/deep_gemm.py:662, with CUDA's division by a Python number."""
    m, n = x.shape
    x_padded = torch.zeros((math.ceil(m / 128) * 128, math.ceil(n / 128) * 128), dtype=x.dtype)
    x_padded[:m, :n] = x
    x_view = x_padded.view(-1, 128, x_padded.size(1) // 128, 128)
    x_amax = x_view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    sf = x_amax * torch.tensor(1.0 / 448.0, dtype=torch.float32)
    sf = torch.pow(2.0, torch.ceil(torch.log2(sf.abs()))) if use_ue8m0 else sf
    x_scaled = (x_view * (1.0 / sf)).to(E4M3)
    return x_scaled.view_as(x_padded)[:m, :n].contiguous(), sf.view(x_view.size(0), x_view.size(2))


def random_weight(shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(shape[0], 1, generator=generator).exp()
    return (0.02 * rows * torch.randn(shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_are_vllm_s(shape, dtype, scales):
    weight = random_weight(shape, dtype)
    codes, scale = reference.quantize(weight, scales)
    expected, expected_scale = per_block_cast_to_fp8(weight, scales == "pow2")
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale)
    assert (codes.dtype, scale.dtype) == (E4M3, torch.float32)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in FP8Tensor(codes, scale).named().items()} == {
        name: (E4M3 if spec.dtype == "F8_E4M3" else torch.float32, spec.shape)
        for name, spec in layout.tensor_specs(*shape).items()
    }


def test_every_code_is_a_value_that_comes_back():
    """448 times a power of two has the scale 2^k of either kind, and every e4m3 value times it is its own code."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3)
    values = every[~every.isnan()].float()
    assert values.max() == 448
    weight = values.repeat(2)[None, : 2 * 127] * 2.0**-9
    for kind in ("fp32", "pow2"):
        codes, scale = reference.quantize(weight[:, :128], kind)
        assert scale.tolist() == [[2.0**-9]]
        assert torch.equal(reference.dequantize(codes, scale, torch.float32), weight[:, :128])


def test_power_of_two_scales_by_hand():
    """The least amax is 1e-4, and 1e-4 / 448 is 1.87 * 2^-23."""
    expected = {448.0: 1.0, 449.0: 2.0, 447.0: 1.0, 896.0: 2.0, 7 * 2.0**-10: 2.0**-16, 1e-9: 2.0**-22, 0.0: 2.0**-22}
    for amax, scale in expected.items():
        assert reference.quantize(torch.tensor([[amax, 0.0]]), "pow2").scale.tolist() == [[scale]]


def test_ties_go_to_even():
    """Between 16 and 18 lies 17, between 18 and 20 lies 19."""
    codes, _ = reference.quantize(torch.tensor([[448.0, 17.0, 19.0, -17.0, 17.001, 0.0, -0.0]]))
    assert codes.float().tolist() == [[448.0, 16.0, 20.0, -16.0, 18.0, 0.0, 0.0]]
    assert torch.signbit(codes.float()).tolist() == [[False, False, False, True, False, False, True]]


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
def test_a_block_depends_on_nothing_beside_it(scales):
    weight = random_weight((384, 256))
    codes, scale = reference.quantize(weight, scales)
    block, own = reference.quantize(weight[128:256, 128:], scales)
    assert torch.equal(codes[128:256, 128:].view(torch.uint8), block.view(torch.uint8))
    assert torch.equal(scale[1:2, 1:], own)


def test_power_of_two_scales_decode_exactly_into_bfloat16():
    codes, scale = reference.quantize(random_weight((200, 300)), "pow2")
    wide = reference.dequantize(codes, scale, torch.float32)
    assert torch.equal(reference.dequantize(codes, scale, torch.bfloat16).float(), wide)
    assert (reference.scale_kind(scale), reference.scale_kind(scale * 1.5)) == ("pow2", "fp32")


def test_compressed_tensors_decodes_the_same():
    codes, scale = reference.quantize(random_weight((256, 384)), "fp32")
    theirs = ct_dequantize(codes, scale, args=SCHEME.weights, dtype=torch.float32)
    assert torch.equal(reference.dequantize(codes, scale, torch.float32), theirs)


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", [(3, 256), (2, 2, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_are_quantized_in_groups(shape, dtype, scales):
    """The formula of vLLM 0.25.1's Triton kernel for 1 x 128 groups; a group of zeros stays zero."""
    tokens = math.prod(shape[:-1])
    x = random_weight((tokens, shape[-1]), dtype)
    x[0, :128] = 0
    codes, scale = reference.quantize_input(x.view(shape), scales)
    assert codes.shape == shape
    groups = F.pad(x.float(), (0, -shape[-1] % 128)).view(tokens, -1, 128)
    expected = groups.abs().amax(-1).clamp(1e-10) / torch.tensor(448.0)
    if scales == "pow2":
        expected = torch.exp2(torch.ceil(torch.log2(expected.clamp(1e-10))))
    assert torch.equal(scale.view(tokens, -1), expected)
    wide = reference.dequantize_input(codes, scale).view(tokens, -1)
    assert wide[0, :128].abs().max() == 0
    assert 20 * math.log10(x.float().norm() / (x.float() - wide).norm()) > 30
    assert scales == "fp32" or torch.equal(wide.bfloat16().float(), wide)


def test_the_product_is_that_of_the_decoded_sides():
    x, weight = random_weight((5, 300)), reference.quantize(random_weight((200, 300), seed=1))
    both = reference.dequantize_input(*reference.quantize_input(x)) @ reference.dequantize(*weight, torch.float32).t()
    assert torch.equal(reference.product(x, weight), both.to(x.dtype))
    exact = x.float() @ reference.dequantize(*weight, torch.float32).t()
    error = (both - exact).norm() / exact.norm()
    assert 0.005 < error < 0.05  # the inputs are rounded, and only to 3 bits


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.tensor([[1.0, math.nan]]), "holds inf or NaN"),
        (torch.tensor([[1.0, math.inf]]), "holds inf or NaN"),
        (torch.ones(4), "takes a 16- or 32-bit float weight"),
        (torch.ones(2, 2).to(E4M3), "quantized already has to be made from its 16-bit one"),
        (torch.ones(0, 2), "has nothing to quantize"),
    ],
)
def test_what_cannot_be_quantized(weight, message):
    with pytest.raises(CheckpointError, match=message):
        reference.quantize(weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, s: (c, s.fill_(0.0)), "6 of 6 scales are zero, negative, infinite or NaN"),
        (lambda c, s: (c, s.index_fill_(1, torch.tensor([2]), math.nan)), "2 of 6 scales"),
        (lambda c, s: (c, -s), "6 of 6 scales"),
        (lambda c, s: (c.view(torch.uint8).fill_(0x7F).view(E4M3), s), "60000 codes are NaN"),
        (lambda c, s: (c.float(), s), r"is torch.float32 \(200, 300\), and FP8 weights are"),
        (lambda c, s: (c, s[:, :2]), r"\(2, 2\), and codes \(200, 300\) need torch.float32 \(2, 3\)"),
        (lambda c, s: (c, s.to(E4M3)), "is torch.float8_e4m3fn"),
    ],
)
def test_what_cannot_be_decoded(change, message):
    with pytest.raises(CheckpointError, match=message) as refused:
        reference.dequantize(*change(*reference.quantize(random_weight((200, 300)))), torch.float32)
    assert "\n" not in str(refused.value)
