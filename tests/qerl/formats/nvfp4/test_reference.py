"""The format in plain torch against compressed-tensors and llm-compressor, bit by bit, and against values by hand."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from qerl.base.errors import CheckpointError
from qerl.checkpoint.experts import GATE_UP, QKV
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


def test_encode_rejects_nan():
    with pytest.raises(CheckpointError, match="NaN"):
        reference.encode_e2m1(torch.tensor([1.0, float("nan")]))


def test_pack_puts_the_even_column_in_the_low_nibble():
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0], [0x7, 0x8, 0x0, 0xE]], dtype=torch.uint8)
    packed = reference.pack_codes(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0x87, 0xE0]]
    assert torch.equal(reference.unpack_codes(packed), codes)


def test_every_byte_survives_unpack_and_pack():
    packed = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    assert torch.equal(reference.pack_codes(reference.unpack_codes(packed)), packed)


@pytest.mark.parametrize(
    "codes",
    [
        torch.zeros(2, 3, dtype=torch.uint8),
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(2, 4, dtype=torch.int64),
        torch.full((2, 4), 16, dtype=torch.uint8),
    ],
)
def test_pack_rejects_anything_but_a_matrix_of_codes(codes):
    with pytest.raises(CheckpointError, match="cannot pack"):
        reference.pack_codes(codes)


@pytest.mark.parametrize("packed", [torch.zeros(4, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int8)])
def test_unpack_rejects_anything_but_a_matrix_of_bytes(packed):
    with pytest.raises(CheckpointError, match="cannot unpack"):
        reference.unpack_codes(packed)


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
    state = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([global_scale]),
    }
    theirs = NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert_same_bits(reference.dequantize(*state.values(), torch.bfloat16), theirs)


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


def test_dequantize_keeps_the_inputs_bits():
    packed, scale = every_code_under_every_scale()
    before = packed.clone(), scale.view(torch.uint8).clone()
    first = reference.dequantize(packed, scale, torch.tensor([3.0]), torch.float32)
    second = reference.dequantize(packed, scale, torch.tensor([3.0]), torch.float32)
    assert torch.equal(first, second)
    assert torch.equal(packed, before[0])
    assert torch.equal(scale.view(torch.uint8), before[1])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_dequantize_rejects_nan_scales(code):
    packed, scale = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    scale[1, 0] = code
    with pytest.raises(CheckpointError, match="NaN"):
        reference.dequantize(packed, scale.view(torch.float8_e4m3fn), torch.ones(1), torch.float32)


@pytest.mark.parametrize("shape", [(2, 4), (2, 12), (2, 17)])
def test_dequantize_rejects_odd_shapes(shape):
    packed = torch.zeros(shape, dtype=torch.uint8)
    scale = torch.ones(shape[0], max(1, shape[1] // 8)).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="multiple of 16"):
        reference.dequantize(packed, scale, torch.ones(1), torch.float32)


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


def test_shared_global_scale_is_that_of_the_largest_weight():
    weights = [torch.full((2, 16), value) for value in (0.5, -2.0, 1.0)]
    shared = reference.shared_global_scale(weights)
    assert shared.item() == 2688 / 2
    packed, block_scale, global_scale = reference.quantize(weights[0], shared)
    assert global_scale.item() == 1344
    assert block_scale.float().unique().item() == 112  # 1344 * 0.5 / 6
    assert packed.unique().item() == 0x77
    assert reference.dequantize(packed, block_scale, global_scale, torch.float32).unique().item() == 0.5


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_rejects_values_that_are_not_finite(value, dtype):
    weight = torch.ones(2, 32, dtype=dtype)
    weight[1, 20] = value
    with pytest.raises(CheckpointError, match="inf or NaN"):
        reference.quantize(weight)


@pytest.mark.parametrize("shape", [(4,), (2, 4, 16), (2, 8), (2, 24), (2, 0), (0, 16)])
def test_quantize_rejects_odd_shapes(shape):
    with pytest.raises(CheckpointError, match="cannot"):
        reference.quantize(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_quantize_rejects_other_dtypes(dtype):
    with pytest.raises(CheckpointError, match="takes a 16- or 32-bit float weight"):
        reference.quantize(torch.ones(2, 16).to(dtype))


@pytest.mark.parametrize(
    "scale",
    [torch.zeros(1), torch.tensor([float("inf")]), torch.tensor(2.0), torch.ones(2), torch.ones(1).bfloat16()],
)
def test_quantize_rejects_a_global_scale_that_is_not_one_positive_float32(scale):
    with pytest.raises(CheckpointError, match="global scale"):
        reference.quantize(torch.ones(2, 16), scale)


# --- the writer itself


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def written(request, tmp_path_factory):
    """(dense weights, written tensors) of a small model with adversarial weights, quantized by llm-compressor."""
    pytest.importorskip("llmcompressor", reason="the quantize extra is not installed")
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    dtype = getattr(torch, request.param)
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, vocab_size=32, head_dim=8)).to(dtype)
    with torch.no_grad():
        for layer, names in zip(model.model.layers, zip(WEIGHTS[::2], WEIGHTS[1::2], strict=True), strict=True):
            layer.self_attn.q_proj.weight.copy_(weight_named(names[0], dtype))
            layer.mlp.up_proj.weight.copy_(weight_named(names[1], dtype))
            layer.mlp.gate_proj.weight.zero_()
    model.save_pretrained(folder / "dense")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    tokenizer.save_pretrained(folder / "dense")
    # down_proj has 24 inputs, which is not a multiple of the block size
    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head", "re:.*(down|o)_proj"])
    oneshot(model=str(folder / "dense"), recipe=recipe, output_dir=str(folder / "packed"))
    return model.state_dict(), load_file(folder / "packed" / "model.safetensors")


def test_quantize_equals_what_llm_compressor_writes(written):
    dense, packed = written
    compared = 0
    for group in (QKV, GATE_UP):
        for parent in {name.rsplit(".", 2)[0] for name in dense if name.endswith(f"{group[0]}.weight")}:
            weights = {name: dense[f"{parent}.{name}.weight"] for name in group}
            scale = reference.shared_global_scale(list(weights.values()))
            for name, weight in weights.items():
                for tensor_name, tensor in reference.quantize(weight, scale).named().items():
                    assert_same_bits(tensor, packed[f"{parent}.{name}.{tensor_name}"])
                    compared += 1
    assert compared == 6 * 5 * 3 == sum(name.endswith(TENSORS) for name in packed)
