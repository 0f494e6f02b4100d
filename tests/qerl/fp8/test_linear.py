"""The FP8 linear against a torch.nn.Linear with the dequantized weight."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from qerl.errors import CheckpointError, EngineError
from qerl.fp8 import reference
from qerl.fp8.linear import FP8Linear

OUT, IN = 200, 300


def twins(dtype=torch.float32, bias=True, scales="pow2"):
    torch.manual_seed(0)
    dense = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    packed = FP8Linear.from_linear(dense, scales)
    dense.weight.data = packed.unpack(dtype)
    return packed, dense.requires_grad_(False)


def bytes_of(linear):
    return {name: buffer.view(torch.uint8).clone() for name, buffer in linear.named_buffers()}


def same(one, other):
    first, second = bytes_of(one), bytes_of(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradient_equal_the_dense_twin(dtype, bias):
    found = []
    for linear in twins(dtype, bias):
        torch.manual_seed(1)
        x = torch.randn(2, 5, IN, dtype=dtype, requires_grad=True)
        y = linear(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    (y, grad), (y_dense, grad_dense) = found
    assert torch.equal(y, y_dense)
    assert torch.equal(grad, grad_dense)


def test_a_state_dict_has_a_checkpoint_s_names_and_loads_them():
    packed, _ = twins()
    state = packed.state_dict()
    assert set(state) == {"weight", "weight_scale", "bias"}
    for assign in (False, True):
        other = FP8Linear(IN, OUT)
        other.load_state_dict(state, assign=assign)
        assert same(packed, other)
    wide = {**state, "weight_scale": state["weight_scale"].bfloat16()}  # powers of two: others write them in 16 bits
    other = FP8Linear(IN, OUT)
    other.load_state_dict(wide, assign=True)
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
    before = bytes_of(packed)
    with pytest.raises(RuntimeError, match=message):
        packed.load_state_dict({**packed.state_dict(), **change})
    assert all(torch.equal(before[name], now) for name, now in bytes_of(packed).items())
    state = {**packed.state_dict(), **change}
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


def test_copies_and_casts_keep_the_bits():
    packed, _ = twins()
    assert same(packed, copy.deepcopy(packed))
    assert same(packed, pickle.loads(pickle.dumps(packed)))
    assert same(packed, copy.deepcopy(packed).to(torch.bfloat16))
    assert copy.deepcopy(packed).to(torch.bfloat16).compute_dtype == torch.bfloat16
    file = io.BytesIO()
    torch.save(packed.state_dict(), file)
    file.seek(0)
    other = FP8Linear(IN, OUT)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same(packed, other)
