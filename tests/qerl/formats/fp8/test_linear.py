"""The FP8 linear against a torch.nn.Linear with the dequantized weight."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from qerl.base.errors import CheckpointError, EngineError
from qerl.formats.fp8 import linear as fp8_linear
from qerl.formats.fp8 import reference
from qerl.formats.fp8.linear import FP8Linear
from qerl.formats.fp8.reference import FP8Tensor
from qerl.model.lora import Part, lora_linear
from tests.helpers.linear_twins import packed_fp8

OUT, IN = 200, 300


def twins(dtype=torch.float32, bias=True, scales="pow2"):
    torch.manual_seed(0)
    dense = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    packed = packed_fp8(dense, scales)
    dense.weight.data = packed.unpack(dtype)
    return packed, dense.requires_grad_(False)


def bytes_of(linear):
    return {name: buffer.view(torch.uint8).clone() for name, buffer in linear.named_buffers()}


def same(one, other):
    first, second = bytes_of(one), bytes_of(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_16_bit_inputs_output_and_gradient_equal_the_dense_twin(dtype, bias):
    found = []
    packed, dense = twins(dtype, bias)
    packed.rounds_input = False
    for linear in (packed, dense):
        torch.manual_seed(1)
        x = torch.randn(2, 5, IN, dtype=dtype, requires_grad=True)
        y = linear(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    (y, grad), (y_dense, grad_dense) = found
    assert torch.equal(y, y_dense)
    assert torch.equal(grad, grad_dense)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_rounded_inputs_have_the_oracle_s_product_and_the_dense_twin_s_gradient(scales, autocast):
    packed, dense = twins(scales=scales)
    weight = FP8Tensor(packed.weight_codes, packed.weight_scale)
    x = torch.randn(2, 5, IN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = packed(x)
        given, bias = (x.bfloat16(), dense.bias.bfloat16()) if autocast else (x, dense.bias)
    assert torch.equal(y, reference.product(given.detach(), weight, scales) + bias)
    with torch.no_grad():
        assert autocast or torch.equal(packed(x), y)
    y.float().sum().backward()
    expected = torch.ones(2, 5, OUT) @ dense.weight
    assert torch.allclose(x.grad, expected, rtol=0.01 if autocast else 1e-5, atol=0.01 if autocast else 1e-5)
    assert not torch.equal(y.float(), dense(x))


def test_products_of_fused_layers_round_the_base_s_input_alone():
    """y = Q(x) W^T + b + s (x A^T) B^T, with the gradients of x W^T."""
    packed, dense = twins()
    x = torch.randn(7, IN, requires_grad=True)
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((4, IN), (OUT, 4)))
    y = lora_linear(x, [Part(packed, a, b, 0.5)])
    expected = packed(x) + 0.5 * (x @ a.t()) @ b.t()
    assert torch.allclose(y, expected, atol=1e-5)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, a, b), grad)
    right = torch.autograd.grad(dense(x) + 0.5 * (x @ a.t()) @ b.t(), (x, a, b), grad)
    for ours, theirs in zip(found, right, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_that_follow_one_another_are_one_product(bias, monkeypatch):
    """q/k/v in an engine: the same as each alone, with biases and adapters; linears of their own stay apart."""
    torch.manual_seed(2)
    codes, scale = reference.quantize(torch.randn(256 + 128 + 72, IN))
    cuts, products = ((0, 256), (256, 384), (384, 456)), []
    bias = torch.randn(456) if bias else None
    linears = [
        FP8Linear.from_tensors(codes[i:j], scale[i // 128 : -(-j // 128)], None if bias is None else bias[i:j])
        for i, j in cuts
    ]
    adapters = [(torch.randn(4, IN), torch.randn(j - i, 4)) for i, j in cuts]
    parts = [Part(linear, a, b, 0.5) for linear, (a, b) in zip(linears, adapters, strict=True)]
    x = torch.randn(7, IN)
    monkeypatch.setitem(
        fp8_linear.PRODUCTS, "cpu", lambda x, *w: products.append(len(w[0])) or reference.product(x, w[:2], w[2])
    )
    together = lora_linear(x, parts)
    assert products == [456]
    assert torch.allclose(together, torch.cat([lora_linear(x, [part]) for part in parts], 1), atol=1e-4)
    monkeypatch.undo()
    assert torch.allclose(together, lora_linear(x, parts), atol=1e-4)
    assert fp8_linear.joined([linears[1], linears[0]]) is None
    apart = [FP8Linear.from_tensors(*reference.quantize(torch.randn(128, IN))) for _ in range(2)]
    assert fp8_linear.joined(apart) is None
    assert lora_linear(x, [Part(each) for each in apart]).shape == (7, 256)


def test_a_product_of_the_card_takes_the_place_of_the_oracle(monkeypatch):
    packed, _ = twins(bias=False)
    asked = []
    monkeypatch.setitem(fp8_linear.PRODUCTS, "cpu", lambda *given: asked.append(given) or torch.ones(10, OUT))
    assert torch.equal(packed(torch.randn(2, 5, IN)), torch.ones(2, 5, OUT))
    assert (asked[0][0].shape, asked[0][3]) == ((10, IN), "pow2")


def test_copies_and_casts_keep_the_bits():
    packed, _ = twins()
    cast = copy.deepcopy(packed).to(torch.bfloat16)
    assert same(packed, cast)
    assert cast.compute_dtype == torch.bfloat16
    assert same(packed, pickle.loads(pickle.dumps(packed)))


def test_a_state_dict_has_a_checkpoint_s_names_and_loads_them():
    packed, _ = twins()
    state = packed.state_dict()
    assert set(state) == {"weight", "weight_scale", "bias"}
    wide = {**state, "weight_scale": state["weight_scale"].bfloat16()}  # powers of two: others write them in 16 bits
    for given, assign in ((state, False), (state, True), (wide, True)):
        other = FP8Linear(IN, OUT)
        other.load_state_dict(given, assign=assign)
        assert same(packed, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(OUT, IN)}, "FP8 weights are torch.float8_e4m3fn"),
        ({"weight_scale": torch.ones(2, 2)}, r"need torch.float32 \(2, 3\)"),
        ({"weight_scale": torch.full((2, 3), math.nan)}, "6 of 6 scales"),
    ],
)
def test_tensors_that_do_not_fit_are_not_loaded(change, message):
    packed, _ = twins()
    before, state = bytes_of(packed), {**packed.state_dict(), **change}
    with pytest.raises(RuntimeError, match=message):
        packed.load_state_dict(state)
    assert all(torch.equal(before[name], now) for name, now in bytes_of(packed).items())
    with pytest.raises(CheckpointError, match=message):
        FP8Linear.from_tensors(state["weight"], state["weight_scale"])


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_writing_gives_the_reference_s_bytes_in_place(scales):
    packed, _ = twins(scales=scales)
    places = {name: buffer.data_ptr() for name, buffer in packed.named_buffers()}
    matrix = 3 * torch.randn(OUT, IN)
    packed.pack_(matrix)
    expected = reference.quantize(matrix, scales)
    assert torch.equal(packed.weight_codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(packed.weight_scale, expected.scale)
    assert {name: buffer.data_ptr() for name, buffer in packed.named_buffers()} == places
    with pytest.raises(EngineError, match=r"the update of q_proj holds inf or NaN: lower optim\.learning_rate"):
        packed.pack_(matrix.index_fill(0, torch.tensor([1]), math.nan), "q_proj")


def test_rows_of_a_larger_weight_are_shared_and_written():
    """As in an engine that fuses linears: blocks of the second part begin at a multiple of 128."""
    codes, scale = reference.quantize(torch.randn(256 + 72, IN))
    part = FP8Linear.from_tensors(codes[256:], scale[2:])
    assert part.weight_codes.data_ptr() == codes[256:].data_ptr()
    matrix = torch.randn(72, IN)
    part.pack_(matrix)
    expected = reference.dequantize(*reference.quantize(matrix), torch.float32)
    assert torch.equal(reference.dequantize(codes, scale, torch.float32)[256:], expected)
    whole = FP8Linear.from_tensors(codes, scale)
    whole.write_(matrix, 128)
    assert torch.equal(whole.unpack(torch.float32)[128:200], expected)
    assert torch.equal(whole.unpack(torch.float32)[256:], expected)


def test_vllm_s_kernels_multiply_16_bit_inputs_by_whole_groups():
    """What they do not take goes to plain torch, such as a model in float32 on a card."""

    def takes(tokens, rows, columns, dtype=torch.bfloat16):
        x = torch.empty(tokens, columns, dtype=dtype, device="meta")
        return fp8_linear.kernel_takes(x, torch.empty(rows, columns, device="meta"))

    assert takes(1, 16, 128)
    assert takes(3, 4608, 3584, torch.float16)
    refused = [(3, 4608, 3584, torch.float32), (3, 4616, 3584), (3, 4608, 3520), (0, 4608, 3584)]
    assert not any(takes(*given) for given in refused)
