"""A frozen start beside the base: the fused product and its gradients against autograd over dense matrices."""

import pytest
import torch

from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.linear import NVFP4Linear
from qerl.model.lora import Part, kept_factors, lora_linear

SIZES = (96, 32, 64)


@pytest.fixture
def group():
    """Three NVFP4 linears that read the same 48 inputs, two of which have a start, and their dense weights."""
    torch.manual_seed(7)
    linears, dense, starts = [], [], []
    for index, rows in enumerate(SIZES):
        packed = reference.quantize(torch.randn(rows, 48))
        linear = NVFP4Linear.of_buffers(packed.named(), (rows, 48), torch.randn(rows) if index != 1 else None, None)
        start = (torch.randn(5, 48), torch.randn(rows, 5)) if index != 2 else None
        linear.start = start
        linears.append(linear)
        dense.append(reference.dequantize(*packed, torch.float32))
        starts.append(start)
    return linears, dense, starts


def expected_of(x, linears, dense, starts, adapters, scale):
    terms = []
    for index, (linear, weight) in enumerate(zip(linears, dense, strict=True)):
        total = weight if starts[index] is None else weight + starts[index][1] @ starts[index][0]
        term = torch.nn.functional.linear(x, total, linear.bias)
        if index in adapters:
            a, b = adapters[index]
            term = term + scale * (x @ a.t()) @ b.t()
        terms.append(term)
    return torch.cat(terms, -1)


@pytest.mark.parametrize("adapted", [(0, 1, 2), (1,), (2,), ()], ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
def test_start_and_adapter_are_one_product(group, adapted, kept):
    linears, dense, starts = group
    torch.manual_seed(8)
    adapters = {
        i: (torch.randn(3, 48, requires_grad=True), torch.randn(SIZES[i], 3, requires_grad=True)) for i in adapted
    }
    x, upstream = torch.randn(2, 5, 48, requires_grad=True), torch.randn(2, 5, sum(SIZES))
    leaves = [x, *(factor for pair in adapters.values() for factor in pair)]
    parts = [Part(linear, *adapters.get(i, (None, None)), 0.7) for i, linear in enumerate(linears)]

    def compute():
        out = lora_linear(x, parts)
        return out, torch.autograd.grad((out * upstream).sum(), leaves)

    if kept:
        with kept_factors():
            compute()  # the second time the factors come from the cache
            out, grads = compute()
    else:
        out, grads = compute()
    right = expected_of(x, linears, dense, starts, adapters, 0.7)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-4)
    for grad, other in zip(grads, torch.autograd.grad((right * upstream).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trains", [False, True])
def test_a_linear_that_is_called_by_itself_has_its_start(group, trains):
    linears, dense, starts = group
    x = torch.randn(4, 48, requires_grad=trains)
    out = linears[0](x)
    total = dense[0] + starts[0][1] @ starts[0][0]
    torch.testing.assert_close(out, torch.nn.functional.linear(x, total, linears[0].bias), rtol=1e-5, atol=1e-4)
    if trains:
        (grad,) = torch.autograd.grad(out.sum(), [x])
        torch.testing.assert_close(grad, total.sum(0).expand(4, -1), rtol=1e-4, atol=1e-4)


def test_without_a_start_the_bits_are_those_of_before(group):
    linears, _, _ = group
    for linear in linears:
        linear.start = None
    torch.manual_seed(9)
    a, b, x = torch.randn(3, 48), torch.randn(96, 3), torch.randn(6, 48)
    out = lora_linear(x, [Part(linears[0], a, b, 0.5)])
    plain = torch.addmm(linears[0].bias, x @ a.t(), b.t(), alpha=0.5)
    assert torch.equal(out, torch.addmm(plain, x, linears[0].dense(torch.float32).t()))
