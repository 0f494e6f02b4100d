"""Linears that round their input: the same result and gradients as autograd through a dense fake quantization."""

import pytest
import torch

from qerl.formats import NVFP4
from qerl.formats.linear import swap_linears
from qerl.formats.nvfp4.activations import Activations, round_by_twin
from qerl.formats.nvfp4.linear import NVFP4Linear
from qerl.model.layers import fuse_
from qerl.model.lora import Part, lora_linear, parts_of
from qerl.model.master import set_master_
from tests.helpers.layer_policies import TOKENS, tiny_model


def rounded(x):
    """The oracle: the rounded value, with the gradient of the identity."""
    return x + (round_by_twin(x.detach()) - x).detach()


def packed(rows, columns=48):
    linear = NVFP4Linear.from_linear(torch.nn.Linear(columns, rows))
    linear.activations = Activations()
    return linear


@pytest.mark.parametrize("fused", [True, False])
def test_the_gradients_of_masters_and_adapters_are_those_of_a_rounded_input(fused):
    torch.manual_seed(0)
    linears, x = [packed(32), packed(16)], torch.randn(5, 48, requires_grad=True)
    a, b = torch.randn(4, 48, requires_grad=True), torch.randn(32, 4, requires_grad=True)
    set_master_(linears[1], torch.randn(16, 48))
    parts = [Part(linears[0], a, b, 0.5), *parts_of(linears[1])]
    y = lora_linear(x, parts) if fused else torch.cat([lora_linear(x, [part]) for part in parts], -1)
    upstream = torch.randn_like(y)
    (y * upstream).sum().backward()
    ours = [tensor.grad for tensor in (x, a, b, linears[1].master)]

    weights = [linear.unpack(torch.float32).requires_grad_() for linear in linears]
    x.grad = a.grad = b.grad = None
    wide = rounded(x)
    dense = [wide @ weight.t() + linear.bias for weight, linear in zip(weights, linears, strict=True)]
    expected = torch.cat([dense[0] + 0.5 * wide @ a.t() @ b.t(), dense[1]], -1)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(y, expected)
    for value, gradient in zip(ours, (x.grad, a.grad, b.grad, weights[1].grad), strict=True):
        torch.testing.assert_close(value, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_linear_that_is_called_alone_rounds_too(needs_gradient):
    torch.manual_seed(1)
    linear, x = packed(32), torch.randn(2, 3, 48, requires_grad=needs_gradient)
    expected = torch.nn.functional.linear(rounded(x), linear.unpack(torch.float32), linear.bias)
    y = linear(x)
    torch.testing.assert_close(y, expected)
    if needs_gradient:
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient, linear.unpack(torch.float32).sum(0).expand(2, 3, 48))


def test_linears_that_round_differently_are_not_computed_as_one():
    first, second = packed(32), packed(16)
    assert len(parts_of(first, second)) == 2
    second.activations = Activations(3.0)
    assert parts_of(first, second) is None


class DenseTwin(torch.nn.Linear):
    """The dense weight of a packed linear, behind a rounded input."""

    def forward(self, x):
        return super().forward(rounded(x))


def test_a_decoder_gives_the_gradients_of_its_dense_twin():
    """q/k/v, o, gate/up and down on the fused paths, against transformers' own layers."""
    model, oracle = tiny_model("qwen3"), tiny_model("qwen3")
    names = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and name != "lm_head"]
    dense = {name: model.get_submodule(name) for name in names}
    swap_linears(model, names, NVFP4)
    for name in names:
        linear = NVFP4Linear.from_linear(dense[name])
        parent, _, leaf = name.rpartition(".")
        twin = DenseTwin(linear.in_features, linear.out_features, bias=linear.bias is not None)
        twin.weight = torch.nn.Parameter(linear.unpack(torch.float32))
        twin.bias = linear.bias
        setattr(oracle.get_submodule(parent), leaf, twin)
        linear.activations = Activations()
        setattr(model.get_submodule(parent), leaf, linear)
        set_master_(linear, linear.unpack(torch.float32))
    fuse_(model)
    for each in (model, oracle):
        each(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name in names:
        expected = oracle.get_submodule(name).weight.grad
        torch.testing.assert_close(model.get_submodule(name).master.grad, expected, rtol=2e-3, atol=2e-6)
