"""The packed linear against its dense twin, a torch.nn.Linear with the dequantized weight."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qerl.base.errors import CheckpointError, QerlError
from qerl.formats.linear import cached_weights
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.linear import NVFP4Linear
from tests.helpers.linear_twins import IN, OUT, assert_same_bits, buffers, output_and_gradient, packed_and_twin

DTYPES = [torch.float32, torch.bfloat16]


# --- the same numbers as the dense twin


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (7, IN), (2, 5, IN), (2, 3, 4, IN)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradient_equal_the_dense_twin(dtype, bias, shape):
    packed, twin = packed_and_twin(dtype, bias)
    x = torch.randn(shape).to(dtype)
    for ours, theirs in zip(output_and_gradient(packed, x), output_and_gradient(twin, x), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_equals_the_dense_twin(dtype, bias):
    packed, twin = packed_and_twin(dtype, bias)
    x = torch.randn(2, 5, IN).to(dtype)
    ours, theirs = output_and_gradient(packed, x, autocast=True), output_and_gradient(twin, x, autocast=True)
    assert ours[0].dtype == theirs[0].dtype == torch.bfloat16
    assert ours[1].dtype == theirs[1].dtype == dtype
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_checkpointing_equals_the_dense_twin(autocast):
    pairs = [packed_and_twin(sizes=sizes) for sizes in ((IN, OUT), (OUT, IN))]
    packed, twin = (nn.Sequential(first, nn.SiLU(), second) for first, second in zip(*pairs, strict=True))
    x = torch.randn(3, IN)
    ours = output_and_gradient(packed, x, autocast, checkpointed=True)
    theirs = output_and_gradient(twin, x, autocast, checkpointed=True)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_equals_the_dense_twin(mode):
    packed, twin = packed_and_twin()
    x = torch.randn(4, IN)
    with mode():
        assert torch.equal(packed(x), twin(x))
    # The byte table made in inference mode must not break a training step afterwards.
    assert torch.equal(output_and_gradient(packed, x)[1], output_and_gradient(twin, x)[1])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_trained_bias_gets_the_twins_gradient(autocast):
    packed, twin = packed_and_twin()
    x = torch.randn(2, 3, IN)
    for module in (packed, twin):
        module.bias.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(x).square().sum().backward()
    assert packed.bias.grad.dtype == torch.float32
    assert torch.equal(packed.bias.grad, twin.bias.grad)


def test_an_input_of_another_dtype_fails_as_it_does_for_the_twin():
    packed, twin = packed_and_twin()
    for module in (packed, twin):
        with pytest.raises(RuntimeError, match="dtype"):
            module(torch.randn(2, IN).bfloat16())


def test_gradient_equals_finite_differences():
    packed, _ = packed_and_twin()
    packed.double()
    torch.autograd.gradcheck(packed, torch.randn(3, IN, dtype=torch.float64, requires_grad=True))


# --- what is kept


def test_everything_is_frozen_and_no_dense_weight_is_stored():
    packed, _ = packed_and_twin()
    assert not any(parameter.requires_grad for parameter in packed.parameters())
    stored = sum(tensor.nbytes for tensor in packed.state_dict().values())
    assert stored == OUT * IN // 2 + OUT * IN // 16 + 4 + 4 * OUT


def test_between_forward_and_backward_no_dense_weight_is_alive(monkeypatch):
    packed, _ = packed_and_twin()
    dense, saved, dequantize = [], [], reference.dequantize_unchecked

    def watched(*args):
        weight = dequantize(*args)
        dense.append(weakref.ref(weight))  # the reference lives as long as anything in torch holds the tensor
        return weight

    monkeypatch.setattr(reference, "dequantize_unchecked", watched)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = packed(torch.randn(3, IN, requires_grad=True))
    assert (len(dense), dense[0](), saved) == (1, None, [])
    y.sum().backward()
    assert (len(dense), dense[1]()) == (2, None)


# --- casting, copying, saving


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.to("cpu", torch.float16), torch.float16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.bfloat16().float(), torch.float32),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu"), torch.float32),
        (lambda m: m.type(torch.bfloat16), torch.bfloat16),
    ],
)
def test_casting_keeps_the_bits_and_changes_the_compute_dtype(cast, dtype):
    packed, twin = packed_and_twin()
    before = copy.deepcopy(packed)
    holder = cast(nn.Sequential(packed))
    assert_same_bits(holder[0], before)
    assert (packed.compute_dtype, packed.bias.dtype, packed.weight.dtype) == (dtype, dtype, dtype)
    cast(nn.Sequential(twin))  # this casts the bias
    twin.weight.data = reference.dequantize(*buffers(before).values(), dtype)
    x = torch.randn(3, IN).to(dtype)
    assert torch.equal(packed(x), twin(x))


@pytest.mark.parametrize("bias", [True, False])
def test_an_empty_linear_on_meta_is_filled_by_a_saved_state(bias, tmp_path):
    packed, twin = packed_and_twin(torch.bfloat16, bias)
    save_file(packed.state_dict(), tmp_path / "linear.safetensors")
    empty = NVFP4Linear(IN, OUT, bias=bias, device="meta", dtype=torch.bfloat16)
    empty.load_state_dict(load_file(tmp_path / "linear.safetensors"), assign=True)
    assert_same_bits(empty, packed)
    x = torch.randn(3, IN).bfloat16()
    assert torch.equal(empty(x), twin(x))


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_a_filled_linear_replaces_its_tensors(assign):
    packed, _ = packed_and_twin(seed=1)
    other, _ = packed_and_twin(seed=2)
    other.load_state_dict(packed.state_dict(), assign=assign)
    assert_same_bits(other, packed)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("weight_scale", torch.ones(OUT, IN // 16), "must be F8_E4M3"),
        ("weight_packed", torch.zeros(OUT, IN // 2), "must be U8"),
        ("weight_packed", torch.zeros(OUT, IN // 4, dtype=torch.uint8), r"\(48, 40\)"),
        ("weight_global_scale", torch.tensor(1.0), r"\(1,\)"),
        ("weight_global_scale", torch.zeros(1), "finite and positive"),
        ("weight_scale", torch.full((OUT, IN // 16), float("nan")).to(torch.float8_e4m3fn), "are NaN"),
    ],
)
def test_loading_tensors_that_do_not_fit_raises_instead_of_casting(name, wrong, message, assign):
    packed, _ = packed_and_twin()
    with pytest.raises(RuntimeError, match=message):
        packed.load_state_dict({**packed.state_dict(), name: wrong}, assign=assign)


def through_torch_save(linear):
    buffer = io.BytesIO()
    torch.save(linear, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save])
def test_a_copy_computes_the_same_and_shares_nothing(copied):
    packed, twin = packed_and_twin(torch.bfloat16)
    with cached_weights(packed):
        packed(torch.randn(1, IN).bfloat16())
        other = copied(packed)
    assert_same_bits(other, packed)
    packed.weight_packed.zero_()
    x = torch.randn(3, IN).bfloat16()
    assert torch.equal(other(x), twin(x))
    assert other.compute_dtype == torch.bfloat16


def test_from_tensors_holds_the_given_tensors():
    packed, twin = packed_and_twin()
    other = NVFP4Linear.from_tensors(*buffers(packed).values(), bias=packed.bias, compute_dtype=torch.bfloat16)
    assert other.weight_packed.data_ptr() == packed.weight_packed.data_ptr()
    assert (other.in_features, other.out_features, other.bias.dtype) == (IN, OUT, torch.bfloat16)
    x = torch.randn(2, IN).bfloat16()
    assert torch.equal(other(x), twin.bfloat16()(x))


def test_from_tensors_checks_its_arguments():
    packed, scale, global_scale = buffers(packed_and_twin()[0]).values()
    for wrong in ((packed[:, 1:], scale, global_scale), (packed, scale.float(), global_scale), (packed, scale, scale)):
        with pytest.raises(CheckpointError):
            NVFP4Linear.from_tensors(*wrong)
    with pytest.raises(CheckpointError, match="bias"):
        NVFP4Linear.from_tensors(packed, scale, global_scale, bias=torch.zeros(OUT + 1))


def test_odd_sizes_are_rejected():
    with pytest.raises(CheckpointError, match="multiple of 16"):
        NVFP4Linear(24, 8)


# --- `.weight`


def test_weight_has_the_twins_shape_and_values_without_storage():
    packed, twin = packed_and_twin(torch.bfloat16)
    weight = packed.weight
    assert (weight.shape, weight.dtype, weight.device) == (twin.weight.shape, twin.weight.dtype, twin.weight.device)
    assert torch.equal(torch.zeros(OUT, IN).copy_(weight), twin.weight.float())
    assert torch.equal(weight.detach().float().norm(), twin.weight.float().norm())
    assert torch.equal(nn.functional.linear(torch.eye(IN).bfloat16(), weight), twin.weight.T)
    assert "weight" not in dict(packed.named_parameters())
    assert weight.data_ptr() == 0


def add_to_data(linear):
    linear.weight.data += 1.0


def assign_data(linear):
    linear.weight.data = torch.zeros(OUT, IN)


@pytest.mark.parametrize(
    "write",
    [
        add_to_data,
        assign_data,
        lambda linear: linear.weight.add_(1),
        lambda linear: nn.init.normal_(linear.weight),
        lambda linear: torch.add(torch.ones(OUT, IN), 1, out=linear.weight),
        lambda linear: linear.reset_parameters(),
    ],
)
def test_writing_to_the_weight_raises(write):
    packed, _ = packed_and_twin()
    before = copy.deepcopy(packed)
    with pytest.raises(QerlError):
        write(packed)
    assert_same_bits(packed, before)
