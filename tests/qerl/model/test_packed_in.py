"""An adapter that is in its packed weight: its gradients are those of autograd through a dense fake quantization."""

import pytest
import torch

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter import adapter_tensors, attach_lora, base_linears, pack_in_
from qerl.engine.update import pack_weights_
from qerl.formats import NVFP4, all_formats
from qerl.formats.linear import swap_linears
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.linear import NVFP4Linear
from qerl.model import master
from qerl.model.layers import fuse_
from qerl.model.lora import Part, lora_linear
from qerl.model.master import LowRankSum
from tests.helpers.layer_policies import TOKENS, tiny_model

CPU = torch.device("cpu")
SHARED = torch.tensor([256.0])


def fake_quant(start, a, b, scale):
    """Q(W0 + s B A) with the gradient of the identity, in float64."""
    dense = start.double() + scale * b @ a
    value = reference.dequantize(*reference.quantize(dense.detach().float(), SHARED), torch.float64)
    return dense + (value - dense).detach()


def adapted(rows, bias, scale, frozen=False):
    """(part, its oracle's A and B, its start) of a random linear with an adapter, which `frozen` ones lack."""
    start, a, b = torch.randn(rows, 48), torch.randn(4, 48), 0.3 * torch.randn(rows, 4)
    linear = NVFP4Linear(48, rows, bias=bias, dtype=torch.float64)
    linear.weight_global_scale.copy_(SHARED)
    if bias:
        linear.bias.data.normal_()
    linear.pack_(start if frozen else LowRankSum(start, a, b, scale).dense(CPU))
    a, b = (factor.double().requires_grad_() for factor in (a, b))
    part = Part(linear) if frozen else Part(linear, a, b, scale, packed_in=True)
    return part, [factor.detach().clone().requires_grad_() for factor in (a, b)], start


@pytest.mark.parametrize("scales", [(2.0, 2.0), (0.5, 1.0)], ids=["one scale", "two scales"])
@pytest.mark.parametrize("needs_input", [False, True])
def test_gradients_are_those_of_dense_fake_quantization(scales, needs_input):
    torch.manual_seed(0)
    made = [adapted(32, True, scales[0]), adapted(16, True, scales[1]), adapted(16, False, 1.0, frozen=True)]
    x = torch.randn(2, 7, 48, dtype=torch.float64, requires_grad=needs_input)
    upstream = torch.randn(2, 7, 64, dtype=torch.float64)
    y = lora_linear(x, [part for part, *_ in made])
    (y * upstream).sum().backward()
    grad_x, x.grad = x.grad, None
    outs = []
    for part, (a, b), start in made:
        weight = fake_quant(start, a, b, part.scale) if part.a is not None else part.base.dense(torch.float64)
        outs.append(torch.nn.functional.linear(x, weight, part.base.bias))
    expected = torch.cat(outs, -1)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for part, (a, b), _ in made[:2]:  # h and the products of the factors are summed in float32 at the end
        torch.testing.assert_close(part.a.grad, a.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(part.b.grad, b.grad, rtol=1e-5, atol=1e-5)
    assert (grad_x is None) == (not needs_input)
    if needs_input:
        torch.testing.assert_close(grad_x, x.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_a_whole_model_multiplies_by_the_packed_weights_alone(fused):
    model = tiny_model("qwen2")
    names = [name for name in base_linears(model) if name.endswith("_proj")]
    starts = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    swap_linears(model, names, NVFP4)
    if fused:
        fuse_(model)
    peft = attach_lora(model.requires_grad_(False), 4, 8)
    pack_in_(peft)
    own = adapter_tensors(model)
    for tensor in own.values():
        tensor.data.normal_(std=0.05)
    linears = base_linears(model)
    assert sorted(linears) == sorted(names)
    sums = {
        name: LowRankSum(starts[name], own[f"{name}.lora_A.weight"], own[f"{name}.lora_B.weight"], 2.0)
        for name in names
    }
    for linear in linears.values():
        linear.weight_global_scale.fill_(256.0)
    pack_weights_(sums, linears)
    with_grad = model(TOKENS).logits
    with_grad.logsumexp(-1).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in own.values())
    dense = tiny_model("qwen2")
    for name in names:
        dense.get_submodule(name).weight.data = linears[name].dense(torch.float32)
    torch.testing.assert_close(with_grad, dense(TOKENS).logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, with_grad, rtol=1e-4, atol=1e-5)


def test_an_adapter_that_would_count_twice_is_an_error():
    model = tiny_model("qwen2")
    pack_in_(attach_lora(model, 4, 8, ("q_proj",), dropout=0.5).train())
    with pytest.raises(CheckpointError, match="would count twice"):
        model(TOKENS)


@pytest.mark.parametrize("format", [each for each in all_formats() if each.quantized], ids=lambda each: each.name)
def test_the_sum_does_not_depend_on_how_many_rows_are_added_at_once(format, monkeypatch):
    torch.manual_seed(1)
    start, a, b = torch.randn(400, 64).bfloat16(), torch.randn(32, 64), torch.randn(400, 32)
    exact = (start.double() + 0.5 * b.double() @ a.double()).float()
    whole = LowRankSum(start, a, b, 0.5)
    assert torch.equal(whole.dense(CPU), exact)
    linear, other = (format.linear()(64, 400, bias=False) for _ in range(2))
    other.pack_(exact)
    monkeypatch.setattr(master, "PIECE", 200 * 64)
    assert [first for first, _ in whole.pieces(CPU)] == [0, 128, 256, 384]
    pack_weights_({"one": whole}, {"one": linear})
    for name, tensor in other.named_buffers():
        assert torch.equal(linear.get_buffer(name).view(torch.uint8), tensor.view(torch.uint8)), name
    dense = torch.nn.Linear(64, 400, bias=False, dtype=torch.bfloat16)
    pack_weights_({"one": whole}, {"one": dense})
    assert torch.equal(dense.weight, exact.bfloat16())
