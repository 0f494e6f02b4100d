"""The experts of a layer against a plain loop over tokens and experts in float64, gradients included.

Without a card but with triton installed, run the kernel that sums over a token's experts by
`TRITON_INTERPRET=1 pytest -m gpu tests/qerl/model/test_experts.py`; last run on an H200 on 2026-11-23.
"""

import os

import pytest
import torch
from torch import nn

from qerl.engine.interface import UNRECORDED
from qerl.formats import BF16, FP8_BLOCK, NVFP4
from qerl.formats.experts import ExpertWeights
from qerl.formats.linear import cached_weights
from qerl.model.experts import ExpertBlock, Experts, Replay, choose, experts_of, sort_by_expert
from tests.helpers.expert_layers import EXPERTS, HIDDEN, loop, random_factors, random_weights
from tests.helpers.layer_policies import difference

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_seed")
KINDS = ("none", "shared", "per_expert")
CHOICES = {
    "usual": lambda: torch.rand(9, EXPERTS).topk(2).indices,
    "one token": lambda: torch.rand(1, EXPERTS).topk(2).indices,
    "all to one expert": lambda: torch.full((7, 1), 3),
    "all to all": lambda: torch.arange(EXPERTS).expand(4, -1),
}


def compared(ids, kind, dtype=torch.float32, format=BF16, rank=3):
    """How far output and gradients are from the loop's, relative to their size: a list."""
    gate_up, down = random_weights(format, dtype)
    factors, shares = random_factors(kind, rank=rank), torch.rand(ids.shape)
    x = torch.randn(len(ids), HIDDEN).to(dtype).requires_grad_()
    leaves = [x] if factors is None else [x, *factors.tensors]
    y = experts_of(x, Experts(gate_up, down), sort_by_expert(ids, shares, EXPERTS), factors)
    assert y.dtype == dtype
    given = None if factors is None else (*factors.tensors, factors.scale)
    expected = loop(x, gate_up.dense(torch.float64), down.dense(torch.float64), ids, shares, given)
    grad = torch.randn(y.shape).to(dtype)
    found = torch.autograd.grad(y, leaves, grad)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    return [
        difference(one.double(), other.double()) for one, other in zip((y, *found), (expected, *wanted), strict=True)
    ]


@pytest.mark.parametrize("rank", [3, 8], ids="rank {}".format)  # one expert after another, or all at once
@pytest.mark.parametrize("format", [BF16, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", CHOICES)
def test_output_and_gradients_are_those_of_a_loop(choice, kind, format, rank):
    """The bounds are about twice what 200 random inputs gave; what one token adds up may nearly cancel."""
    cancelled = 5 if choice == "one token" else 1
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 7e-2)):
        assert max(compared(CHOICES[choice](), kind, dtype, format, rank)) < cancelled * bound


def test_an_expert_that_no_token_goes_to_has_no_gradient():
    factors, ids = random_factors("per_expert"), torch.tensor([[0, 4], [4, 0]])
    y = experts_of(
        torch.randn(2, HIDDEN), Experts(*random_weights(BF16)), sort_by_expert(ids, torch.rand(2, 2), EXPERTS), factors
    )
    for gradient in torch.autograd.grad(y.sum(), factors.tensors):
        used = gradient.flatten(1).abs().amax(1) > 0
        assert used.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("at_once", [1, 2, 3], ids="{} at once".format)
@pytest.mark.parametrize(
    ("format", "size"), [(NVFP4, 16), (FP8_BLOCK, 128)], ids=lambda value: getattr(value, "name", "")
)
def test_packed_experts_are_the_linears_of_their_format(format, size, at_once, monkeypatch):
    monkeypatch.setattr("qerl.formats.experts.CPU_PIECE", at_once * 2 * size * size)
    weights, expected = ExpertWeights(format, (3, 2 * size, size), parts=2), []
    for expert in range(3):
        halves = [(expert + 1) * torch.randn(size, size) for _ in range(2)]
        stored = format.quantize(halves)
        expected.append(torch.cat([format.dequantize(tensors, torch.float32) for tensors in stored]))
        for number, tensors in enumerate(stored):
            for name, tensor in tensors.items():
                weights.write_(name, expert, number * size, tensor)
    assert torch.equal(weights.dense(torch.float32), torch.stack(expected))
    assert weights.tensor_names == format.tensors
    before = {name: buffer.clone() for name, buffer in weights.named_buffers()}
    weights.to(torch.bfloat16)
    assert weights.compute_dtype == torch.bfloat16
    for name, tensor in before.items():
        assert torch.equal(weights.get_buffer(name).view(torch.uint8), tensor.view(torch.uint8))
    with cached_weights(nn.ModuleList([weights])) as cache:
        assert weights.dense(torch.float32) is weights.dense(torch.float32)
        assert cache.bytes == 3 * 2 * size * size * 4


def test_experts_whose_blocks_of_rows_are_cut_off_are_decoded_one_by_one():
    matrices = [10.0**expert * torch.randn(192, 128) for expert in range(2)]  # one and a half blocks of rows
    weights = ExpertWeights(FP8_BLOCK, (2, 192, 128))
    for expert, matrix in enumerate(matrices):
        for name, tensor in FP8_BLOCK.quantize([matrix])[0].items():
            weights.write_(name, expert, 0, tensor)
    assert difference(weights.dense(torch.float32).double(), torch.stack(matrices).double()) < 0.05


def block(chosen=2, normalises=True, format=BF16):
    router = nn.Linear(HIDDEN, EXPERTS, bias=False)
    return ExpertBlock(router, Experts(*random_weights(format)), chosen, normalises, place=1).requires_grad_(False)


@pytest.mark.parametrize("normalises", [True, False])
def test_the_router_is_that_of_transformers_with_weights_in_float32(normalises):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    router = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(num_experts=EXPERTS, num_experts_per_tok=2, hidden_size=HIDDEN, norm_topk_prob=normalises)
    )
    nn.init.normal_(router.weight)
    x = torch.randn(9, HIDDEN)
    logits, weights, ids = router(x)
    found_ids, found, own = choose(logits, 2, normalises)
    assert torch.equal(found_ids, ids)
    assert torch.equal(own, ids)
    assert torch.equal(found, weights)
    assert choose(logits.bfloat16(), 2, normalises)[1].dtype == torch.float32


def test_a_block_routes_computes_and_says_what_it_chose():
    layer, x = block(), torch.randn(2, 3, HIDDEN)
    layer.recorded = []
    y = layer(x)
    ids, weights, _ = choose(x.view(6, HIDDEN) @ layer.gate.weight.t(), 2, True)
    expected = loop(x.view(6, HIDDEN), layer.experts.gate_up_proj.weight, layer.experts.down_proj.weight, ids, weights)
    assert difference(y.view(6, HIDDEN).double(), expected) < 1e-6
    (recorded,) = layer.recorded
    assert recorded.dtype == torch.uint8
    assert torch.equal(recorded.long(), ids.view(2, 3, 2))


def test_a_replay_decides_where_tokens_go_and_the_layers_own_logits_the_weights():
    layer, x = block(), torch.randn(1, 4, HIDDEN)
    logits = x[0] @ layer.gate.weight.t()
    own = logits.topk(2).indices
    other = logits.topk(2, largest=False).indices
    given = torch.stack([own[0].flip(0), other[1], other[2], torch.full((2,), UNRECORDED)])
    ids = torch.zeros(4, 2, 2, dtype=torch.uint8)
    ids[:, 1] = given
    replay = Replay.of(ids)
    y = layer(x, replay)
    used = torch.cat([given[:3], own[3:]])
    shares = torch.softmax(logits, -1).gather(1, used)
    shares /= shares.sum(1, keepdim=True)
    expected = loop(x[0], layer.experts.gate_up_proj.weight, layer.experts.down_proj.weight, used, shares)
    assert difference(y[0].double(), expected) < 1e-6
    assert replay.changed.tolist() == [0.0, 2.0]  # the order of a token's experts is no difference


def test_no_gradient_goes_through_the_router():
    layer, x = block(chosen=1, normalises=False), torch.randn(1, 2, HIDDEN, requires_grad=True)
    layer.gate.weight.requires_grad_()
    layer.experts.down_proj.weight.zero_()
    layer.experts.down_proj.weight[:, 0, 0] = 1.0
    layer.experts.gate_up_proj.weight.zero_()  # the output is 0 for every input, and so is its gradient
    y = layer(x)
    y.sum().backward()
    assert layer.gate.weight.grad is None
    assert not x.grad.any()


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "chosen", "columns"), [(1, 1, 7), (5, 2, 16), (9, 8, 1300), (0, 2, 16)])
def test_the_sum_over_a_tokens_experts_is_that_in_float64(tokens, chosen, columns, dtype, weighted):
    from qerl.model.kernels import sum_of_rows

    shares = torch.rand(tokens, chosen, device=DEVICE)
    routed = sort_by_expert(torch.rand(tokens, 16, device=DEVICE).topk(chosen).indices, shares, 16)
    rows = torch.randn(tokens * chosen, columns, device=DEVICE).to(dtype)
    found = sum_of_rows(rows, routed.row, shares if weighted else None)
    factors = shares.double() if weighted else torch.ones_like(shares).double()
    expected = (rows.double()[routed.row] * factors[..., None]).sum(1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
