"""The format in plain torch against compressed-tensors and llm-compressor, bit by bit, and against values by hand."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from qerl.base.errors import CheckpointError
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.layout import TENSORS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SCHEME: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def quantize_with_compressed_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize one weight with llm-compressor's observer and compressor (observers/base.py get_qparams)."""
    blocks = weight.unflatten(1, (-1, 16))
    low, high = blocks.amin(-1), blocks.amax(-1)
    amax = torch.max(high.max(), -low.min()).reshape(1)
    global_scale = generate_gparam(-amax, amax)
    scale, _ = calculate_qparams(low, high, SCHEME.weights, global_scale)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.compress(state, SCHEME)


# --- codes


def test_decode_of_the_sixteen_codes():
    values = reference.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert values.tolist() == [*E2M1, *(-value for value in E2M1)]
    assert values.signbit().tolist() == [False] * 8 + [True] * 8  # code 8 is -0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("midpoint", "below", "tie", "above"),
    [
        (0.25, 0, 0, 1),
        (0.75, 1, 2, 2),
        (1.25, 2, 2, 3),
        (1.75, 3, 4, 4),
        (2.5, 4, 4, 5),
        (3.5, 5, 6, 6),
        (5.0, 6, 6, 7),
    ],
)
def test_encode_around_the_midpoints_ties_to_the_even_code(midpoint, below, tie, above, sign, dtype):
    middle = torch.tensor(midpoint, dtype=dtype)
    neighbours = [torch.nextafter(middle, torch.zeros_like(middle)), middle, torch.nextafter(middle, middle + 1)]
    codes = reference.encode_e2m1(torch.stack(neighbours) * sign)
    assert codes.tolist() == [code + 8 * (sign < 0) for code in (below, tie, above)]


def test_encode_of_zeros_small_and_large_values():
    values = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 6.0, 7.0, 1e30, float("inf"), -6.0, -float("inf")])
    assert reference.encode_e2m1(values).tolist() == [0, 0, 0, 8, 7, 7, 7, 7, 15, 15]
    with pytest.raises(CheckpointError, match="NaN"):
        reference.encode_e2m1(torch.tensor([1.0, float("nan")]))


def test_pack_puts_the_even_column_in_the_low_nibble_and_every_byte_survives():
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0], [0x7, 0x8, 0x0, 0xE]], dtype=torch.uint8)
    packed = reference.pack_codes(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0x87, 0xE0]]
    assert torch.equal(reference.unpack_codes(packed), codes)
    every = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    assert torch.equal(reference.pack_codes(reference.unpack_codes(every)), every)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (reference.pack_codes, torch.zeros(2, 3, dtype=torch.uint8)),
        (reference.pack_codes, torch.zeros(4, dtype=torch.uint8)),
        (reference.pack_codes, torch.zeros(2, 4, dtype=torch.int64)),
        (reference.pack_codes, torch.full((2, 4), 16, dtype=torch.uint8)),
        (reference.unpack_codes, torch.zeros(4, dtype=torch.uint8)),
        (reference.unpack_codes, torch.zeros(2, 4, dtype=torch.int8)),
    ],
)
def test_pack_and_unpack_reject_anything_but_a_matrix_of_bytes(call, given):
    with pytest.raises(CheckpointError, match=r"cannot (un)?pack"):
        call(given)


# --- dequantize


def every_code_under_every_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """A row for each of the 254 e4m3 codes that are numbers. Its 16 blocks hold all 256 bytes, in two halves."""
    scale_codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)
    packed = torch.arange(256, dtype=torch.uint8).expand(len(scale_codes), 256).contiguous()
    scale = scale_codes[:, None].expand(-1, 32).contiguous().view(torch.float8_e4m3fn)
    return packed, scale


@pytest.mark.parametrize("global_scale", [1.0, 448.0, 1234.567, 2.6875, 3.3e38, 8.96e-36, 0.1])
def test_dequantize_equals_compressed_tensors_on_every_code_and_scale(global_scale):
    packed, scale = every_code_under_every_scale()
    given = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([global_scale])}
    theirs = NVFP4PackedCompressor.decompress(given, SCHEME)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert_same_bits(reference.dequantize(*given.values(), torch.bfloat16), theirs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_dequantize_equals_compressed_tensors_in_every_dtype(dtype):
    packed, scale = every_code_under_every_scale()
    global_scale = torch.tensor([1234.567])
    values = reference.decode_e2m1(reference.unpack_codes(packed))
    theirs = ct_dequantize(values, scale.float(), args=SCHEME.weights, dtype=dtype, global_scale=global_scale)
    assert_same_bits(reference.dequantize(packed, scale, global_scale, dtype), theirs)


def test_dequantize_by_hand():
    packed = torch.tensor([[0x10, 0x98, 0xF7, 0, 0, 0, 0, 0, 0x22, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.uint8)
    scale = torch.tensor([[16.0, 448.0]]).to(torch.float8_e4m3fn)
    weight = reference.dequantize(packed, scale, torch.tensor([8.0]), torch.float32)
    assert weight[0, :6].tolist() == [0.0, 1.0, -0.0, -1.0, 12.0, -12.0]
    assert weight[0, :4].signbit().tolist() == [False, False, True, True]
    assert weight[0, 16:19].tolist() == [56.0, 56.0, 0.0]


@pytest.mark.parametrize("shape", [(2, 4), (2, 12), (2, 17)])
def test_dequantize_rejects_odd_shapes_and_nan_scales(shape):
    packed = torch.zeros(shape, dtype=torch.uint8)
    scale = torch.ones(shape[0], max(1, shape[1] // 8)).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="multiple of 16"):
        reference.dequantize(packed, scale, torch.ones(1), torch.float32)
    nans = torch.full((2, 2), float("nan")).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="4 block scales are NaN"):
        reference.dequantize(torch.zeros(2, 16, dtype=torch.uint8), nans, torch.ones(1), torch.float32)


# --- quantize


def weight_named(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Random and adversarial weights (24, 96)."""
    random = torch.Generator().manual_seed(len(name))
    weight = torch.randn(24, 96, generator=random)
    tiny = torch.finfo(dtype).smallest_normal
    if name == "zeros":
        weight.zero_()
    elif name == "minus zeros":
        weight = weight.sign() * 0.0
    elif name == "one outlier":
        weight *= 1e-2
        weight[5, 37] = -1000.0
    elif name == "only one outlier":
        weight.zero_()
        weight[5, 37] = 0.37
    elif name == "subnormal":
        weight *= tiny / 16
    elif name == "tiny":
        weight *= tiny * 3
    elif name == "near the overflow of the global scale":
        weight *= 1e-36 if dtype != torch.float16 else 0.015
    elif name == "huge":
        weight *= torch.finfo(dtype).max / 8
    elif name == "every magnitude":
        exponents = torch.randint(-30, 4, weight.shape, generator=random)
        weight *= 2.0**exponents if dtype != torch.float16 else 2.0 ** (exponents / 2)
    elif name == "ties":  # with amax 6 the block scale is 448 / 448, so the weights are the scaled values
        weight = torch.randint(-28, 29, weight.shape, generator=random) / 4
        weight.clamp_(-6, 6)[:, ::16] = 6
    elif name == "negative underflow":
        weight = weight.abs() * -1e-7
        weight[:, ::16] = 1.0
    else:
        weight *= 0.02
    return weight.to(dtype)


WEIGHTS = [
    "normal", "zeros", "minus zeros", "one outlier", "only one outlier", "subnormal", "tiny",
    "near the overflow of the global scale", "huge", "every magnitude", "ties", "negative underflow",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_quantize_equals_compressed_tensors(name, dtype):
    weight = weight_named(name, dtype)
    theirs = quantize_with_compressed_tensors(weight.clone())
    for tensor_name, tensor in reference.quantize(weight).named().items():
        expected = theirs[tensor_name]
        assert_same_bits(tensor, expected)


def test_quantize_by_hand():
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([6.0, -3.0, 0.7, -0.2])
    weight[0, 16:18] = torch.tensor([1.5, -0.25])
    packed, block_scale, global_scale = reference.quantize(weight)
    assert global_scale.tolist() == [448.0]  # 448 * 6 / 6
    assert block_scale.float().tolist() == [[448.0, 112.0]]  # 448 * amax / 6
    assert packed[0, :2].tolist() == [0xD7, 0x81]  # 6, -3, 0.5 (0.7 rounds down), -0.0
    assert packed[0, 8].item() == 0xA7  # 1.5 / 0.25 = 6, -0.25 / 0.25 = -1


def test_a_zero_block_gets_the_scale_that_llm_compressor_writes():
    packed, block_scale, global_scale = reference.quantize(torch.zeros(2, 16))
    assert (global_scale.item(), block_scale.float().unique().item(), packed.max().item()) == (1.0, 0.125, 0)


@pytest.mark.parametrize(
    ("amax", "dtype", "expected"),
    [
        (6.0, torch.float32, 448.0),
        (1000.0, torch.float32, 2.688000202178955),
        (1000.0, torch.bfloat16, 2.6875),  # rounded to a mantissa of 8 bits
        (0.0, torch.float32, 1.0),
        (1e-37, torch.bfloat16, 1.0),  # 2688 / amax overflows
        (0.03, torch.float16, 1.0),  # in float16 it overflows with an ordinary amax
    ],
)
def test_global_scale(amax, dtype, expected):
    scale = reference.global_scale(torch.tensor(amax, dtype=dtype))
    assert (scale.dtype, tuple(scale.shape), scale.item()) == (torch.float32, (1,), expected)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_rejects_values_that_are_not_finite(value, dtype):
    weight = torch.ones(2, 32, dtype=dtype)
    weight[1, 20] = value
    with pytest.raises(CheckpointError, match="inf or NaN"):
        reference.quantize(weight)


@pytest.mark.parametrize("shape", [(4,), (2, 4, 16), (2, 8), (2, 24), (2, 0), (0, 16)])
def test_quantize_rejects_odd_shapes_and_other_dtypes(shape):
    with pytest.raises(CheckpointError, match="cannot"):
        reference.quantize(torch.ones(shape))
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(CheckpointError, match="takes a 16- or 32-bit float weight"):
            reference.quantize(torch.ones(2, 16).to(dtype))


@pytest.mark.parametrize(
    "scale",
    [torch.zeros(1), torch.tensor([float("inf")]), torch.tensor(2.0), torch.ones(2), torch.ones(1).bfloat16()],
)
def test_quantize_rejects_a_global_scale_that_is_not_one_positive_float32(scale):
    with pytest.raises(CheckpointError, match="global scale"):
        reference.quantize(torch.ones(2, 16), scale)


def normal(rows=256, columns=512, seed=0, dtype=torch.bfloat16):
    return (0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).to(dtype)


def dequantized(weight, scale, dtype=torch.float32):
    return reference.dequantize(*reference.quantize(weight, scale), dtype)


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


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_head_room_changes_no_normal_weight(bits):
    weight = normal()
    plain, roomy = (reference.shared_global_scale([weight], "pow2", room) for room in (0, bits))
    assert plain.item() == roomy.item() * 2**bits
    assert torch.equal(dequantized(weight, plain), dequantized(weight, roomy))


@pytest.mark.parametrize("bits", [0, 2])
def test_head_room_is_the_factor_by_which_weights_may_grow(bits):
    weight = normal()
    assert (
        reference.faults(weight, reference.shared_global_scale([weight]))[1] == 0
    )  # the usual scale saturates nothing
    weight[0, 0] = 2.625 / 16  # the scale of its block is 448 without head room
    scale = reference.shared_global_scale([weight], "pow2", bits)
    assert reference.faults(weight * 2**bits, scale)[1] == 0
    weight = weight * 2**bits
    # Up to 464 the nearest value is 448, the largest e4m3 number.
    for growth, count in ((1.03, 0), (1.05, 1), (2.0, 1)):
        grown = weight.clone()
        grown[0, 0] *= growth
        assert reference.faults(grown, scale)[1] == count


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
