"""The kernels that decode and pack against their twins in plain torch."""

import os

import pytest
import torch

from qerl.formats.fp8 import layout, reference, training
from qerl.formats.fp8.reference import E4M3
from qerl.formats.fp8.training import E5M2

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]  # interpreted, bfloat16 is cut off

pytestmark = pytest.mark.gpu(instead=INTERPRETED)

if INTERPRETED or torch.cuda.is_available():
    from qerl.formats.fp8 import kernels


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def decoded(codes, scale, dtype):
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


def around(codes):
    """The values of the codes, those half way between two, and the neighbours of these in float32; of both signs."""
    values = codes.float()
    half = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, half, torch.nextafter(half, half * 2), torch.nextafter(half, half * 0)])
    return torch.cat([near, -near])


def packed(matrix, scales):
    """What the kernel writes into rows of a larger weight, and its faults; all that is beside the rows stays."""
    rows, columns = matrix.shape
    codes = torch.full((rows + 256, columns), 0x55, dtype=torch.uint8, device=DEVICE).view(E4M3)
    scale = torch.full((layout.blocks(rows) + 2, layout.blocks(columns)), 7.0, device=DEVICE)
    inside = codes[128 : 128 + rows], scale[1 : 1 + layout.blocks(rows)]
    faults = kernels.pack_(matrix, *inside, scales)
    assert (codes.view(torch.uint8)[[0, 127, -128, -1]] == 0x55).all()
    assert (scale[[0, -1]] == 7).all()
    return *inside, int(faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (1, 5)], ids=str)
def test_packing_gives_the_oracle_s_bits(shape, scales, dtype):
    matrix = (torch.randn(shape, device=DEVICE) * torch.logspace(-9, 2, shape[1], device=DEVICE)).to(dtype)
    codes, scale, faults = packed(matrix, scales)
    right = reference.quantize(matrix, scales)
    assert same_bits(codes, right.codes)
    assert torch.equal(scale, right.scale)
    assert faults == 0


def test_packing_rounds_every_step_between_codes_as_the_oracle_does():
    near = around(torch.arange(127, dtype=torch.uint8).view(E4M3))
    matrix = torch.nn.functional.pad(near, (0, 10)).view(2, -1).to(DEVICE)
    matrix[:, ::128] = 448  # a scale of 1 in each block
    codes, scale, _ = packed(matrix, "pow2")
    assert (scale == 1).all()
    assert same_bits(codes, reference.quantize(matrix).codes)


def test_packing_counts_what_is_not_finite():
    matrix = torch.randn(130, 200, device=DEVICE)
    matrix[0, 0], matrix[129, 199], matrix[5, 5] = torch.inf, torch.nan, -torch.inf
    assert packed(matrix, "pow2")[2] == 3


def check_rounded(x, dtype, plain=True, turned=0):
    """Compare the kernel's codes and scale of x with those of its twin on the CPU; returns the kernel's codes."""
    found, right = kernels.round_matrix(x, dtype, plain, turned), training.round_matrix(x.cpu(), dtype, plain, turned)
    for one, other in zip(found, right, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.shape == other.shape and same_bits(one.cpu()[None], other[None]))
    return found.codes if plain else found.turned


@pytest.mark.parametrize(("plain", "turned"), [(True, 0), (False, 1), (True, 16), (False, 16)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (1, 5), (5, 1)], ids=str)
def test_a_matrix_is_rounded_to_the_twin_s_bits_also_turned(shape, dtype, plain, turned):
    x = torch.randn(shape, device=DEVICE) * torch.logspace(-9, 2, shape[1], device=DEVICE)
    check_rounded(x, dtype, plain, turned)
    wide = torch.cat([x, x], 1)
    check_rounded(wide[:, shape[1] :], dtype, plain, turned)  # columns of more


@pytest.mark.parametrize("put", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("shape", [(3, 1500), (1, 8)], ids=str)
def test_swiglu_s_backward_pass_finds_the_largest_magnitudes_of_what_it_writes(shape, put):
    """Rounding with them gives the same bits as without."""
    from qerl.formats.fp8 import kernels as fp8
    from qerl.model import kernels, twins

    x, grad = torch.randn(shape[0], 2 * shape[1], device=DEVICE), torch.randn(shape, device=DEVICE)
    x, grad = x.to(DTYPES[-1]), grad.to(DTYPES[-1])
    if put is not None:
        x[-1, 1], grad[-1, 2] = put, put
    right, found = (torch.full((2,), 7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    twins.swiglu_backward_(x, grad.clone(), right)
    written = kernels.swiglu_backward_(x, activation := grad.clone(), found), activation
    for one, other, matrix in zip(found, right, written, strict=True):
        value, wanted = one.view(torch.float32), other.view(torch.float32)
        assert value.isnan() == wanted.isnan()
        assert wanted.isnan() or torch.isclose(value, wanted, rtol=1e-2)
        known, own = (fp8.round_matrix(matrix, E4M3, True, 16, bits) for bits in (one, None))
        assert all(same_bits(a[None], b[None]) for a, b in zip(known, own, strict=True))


def test_the_largest_magnitude_may_be_anywhere_and_a_matrix_of_zeros_has_a_scale():
    x = torch.randn(130, 2200, device=DEVICE)
    for place in ((0, 0), (129, 2199), (64, 2048), (129, 0)):
        one = x.clone()
        one[place] = -1e6
        check_rounded(one, E4M3)
    check_rounded(torch.zeros(3, 4, device=DEVICE), E5M2, turned=16)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_rounding_a_matrix_takes_the_even_code_of_two_and_keeps_nan(dtype):
    codes = torch.arange(128, dtype=torch.uint8).view(dtype)
    x = around(codes[codes.float().isfinite()])[None].to(DEVICE)
    check_rounded(x, dtype, plain=False, turned=1)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[0, 3] = bad
        codes, _, scale = kernels.round_matrix(x, dtype)
        assert scale.isnan()
        assert codes.cpu().float().isnan().all()


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (1, 5)], ids=str)
def test_codes_are_turned_also_those_of_rows_of_more(shape):
    rows, columns = shape
    more = torch.randint(0, 256, (rows + 7, columns), dtype=torch.uint8, device=DEVICE).view(E4M3)
    turned = kernels.turn(more[7:])
    assert turned.dtype == E4M3
    assert same_bits(turned, more.view(torch.uint8)[7:].t().contiguous())


@pytest.mark.parametrize("aligned", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("tokens", [1, 5, 64, 1027])
def test_inputs_are_rounded_to_the_twin_s_bits(tokens, scales, dtype, aligned):
    columns = 128 if INTERPRETED else 3584
    wide = torch.randn(tokens, 2 * columns, device=DEVICE) * torch.logspace(-12, 3, 2 * columns, device=DEVICE)
    wide[tokens // 2, :columns] = 0
    for x in (wide.to(dtype)[:, :columns], wide.to(dtype)[:, columns:]):
        found, right = kernels.quantize_input(x, scales, aligned), reference.quantize_input(x, scales)
        assert found.scale.stride() == (1, -(-tokens // aligned) * aligned)
        assert torch.equal(found.scale, right.scale)
        assert same_bits(found.codes, right.codes)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_rounding_an_input_takes_the_even_code_of_two(scales):
    near = around(torch.arange(127, dtype=torch.uint8).view(E4M3))
    near = torch.cat([near, near.new_zeros(-len(near) % 127)]).view(-1, 127)
    x = torch.cat([torch.full((len(near), 1), 448.0), near], 1).to(DEVICE)  # their scale is 1
    found, right = kernels.quantize_input(x, scales), reference.quantize_input(x, scales)
    assert same_bits(found.codes, right.codes)
