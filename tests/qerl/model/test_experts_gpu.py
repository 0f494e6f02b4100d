"""The experts of a layer on a GPU, where torch multiplies all experts at once in 16 bits, against a loop in float64.

Last run on an H200 on 2026-11-23.
"""

import pytest
import torch

from qerl.formats import BF16, NVFP4
from qerl.formats.experts import ExpertWeights
from qerl.model.experts import ExpertFactors, Experts, experts_of, grouped_outer, grouped_product, sort_by_expert
from tests.helpers.layer_policies import difference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_seed")]
DEVICE = "cuda"
EXPERTS, HIDDEN, WIDTH, RANK, CHOSEN = 16, 256, 96, 4, 4


def random_weights(format, shape):
    """Random matrices of all experts on the card, with products in bfloat16; packed if the format is quantized."""
    weights = ExpertWeights(format, shape, DEVICE, torch.bfloat16)
    for expert in range(EXPERTS):
        matrix = 0.1 * torch.randn(shape[1:])
        stored = format.quantize([matrix])[0] if format.quantized else {"weight": matrix}
        for name, tensor in stored.items():
            weights.write_(name, expert, 0, tensor)
    return weights


def random_block(shared, format, tokens):
    """Experts, factors and routed rows of so many tokens, some experts of which get none; on the card in bfloat16."""
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    weights = [random_weights(format, shape) for shape in shapes]
    outer = () if shared else (EXPERTS,)
    shapes = ((*outer, RANK, HIDDEN), (EXPERTS, 2 * WIDTH, RANK), (EXPERTS, RANK, WIDTH), (*outer, HIDDEN, RANK))
    factors = [(0.1 * torch.randn(shape, device=DEVICE)).requires_grad_() for shape in shapes]
    logits = torch.randn(tokens, EXPERTS, device=DEVICE)
    logits[:, ::5] -= 100
    shares, ids = logits.softmax(-1).topk(CHOSEN)
    return Experts(*weights), ExpertFactors(*factors, 0.5), sort_by_expert(ids, shares, EXPERTS)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("format", [BF16, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per expert"])
def test_output_and_gradients_are_within_16_bits_of_the_same_in_float64(shared, format, tokens):
    weights, lora, routed = random_block(shared, format, tokens)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    y = experts_of(x, weights, routed, lora)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *lora.tensors], grad)
    again = torch.autograd.grad(experts_of(x, weights, routed, lora), [x, *lora.tensors], grad)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))

    wide = Experts(*(weight_in_float64(one) for one in (weights.gate_up_proj, weights.down_proj)))
    factors = [factor.detach().double().requires_grad_() for factor in lora.tensors]
    x_64 = x.detach().double().requires_grad_()
    expected = experts_of(x_64, wide, routed, ExpertFactors(*factors, lora.scale))  # a loop over the experts
    wanted = torch.autograd.grad(expected, [x_64, *factors], grad.double())
    for one, other in zip((y, *found), (expected, *wanted), strict=True):
        assert difference(one.double(), other.double()) < 2e-2


def weight_in_float64(weights):
    shape = (weights.experts, weights.out_features, weights.in_features)
    wide = ExpertWeights(BF16, shape, DEVICE, torch.float64)
    wide.weight.copy_(weights.dense(torch.float64))
    return wide


@pytest.mark.parametrize("rows", [0, 1, 257])
def test_products_of_groups_are_those_of_each_group(rows):
    ends = torch.tensor([0, rows // 2, rows // 2, rows], device=DEVICE, dtype=torch.int32)
    x, w = (torch.randn(s, device=DEVICE, dtype=torch.bfloat16) for s in ((rows, 64), (4, 64, 32)))
    y, outer = grouped_product(x, w, ends), grouped_outer(x, x[:, :32].contiguous(), ends)
    assert outer.dtype == torch.float32
    for group, (start, end) in enumerate([(0, 0), (0, rows // 2), (rows // 2, rows // 2), (rows // 2, rows)]):
        torch.testing.assert_close(y[start:end], x[start:end] @ w[group], rtol=2**-7, atol=2**-4)
        expected = x[start:end].double().t() @ x[start:end, :32].double()
        torch.testing.assert_close(outer[group].double(), expected, rtol=1e-2, atol=2**-3)
