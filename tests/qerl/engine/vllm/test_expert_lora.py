"""The engine's adapter on experts: its products are those of the trainer, and the sync fills its buffers.

The kernels are compared on a card, or with `TRITON_INTERPRET=1 pytest -m gpu` by Triton's interpreter.
Last run on an H200 on 2026-11-23.
"""

import os

import pytest
import torch
from expert_layers import EXPERTS, HIDDEN, RANK, WIDTH, loop, random_factors

from qerl.base.errors import EngineError
from qerl.engine.vllm import expert_lora
from qerl.engine.vllm.expert_lora import ExpertBuffers, copy_to_experts_, expert_slots, of_experts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
TOKENS, CHOSEN, SCALE = 7, 2, 0.5


def tensors_of(kind, rank=RANK):
    """An adapter on the experts of two layers, by the names of its tensors."""
    outer = () if kind == "shared" else (EXPERTS,)
    shapes = ((*outer, rank, HIDDEN), (EXPERTS, 2 * WIDTH, rank), (EXPERTS, rank, WIDTH), (*outer, HIDDEN, rank))
    leaves = [f"{leaf}.lora_{factor}.weight" for leaf in ("gate_up_proj", "down_proj") for factor in "AB"]
    return {f"{name}.{leaf}": torch.randn(shape) for name in NAMES for leaf, shape in zip(leaves, shapes, strict=True)}


def buffers_of(kind, rank=RANK):
    made = {name: ExpertBuffers.zeros((EXPERTS, WIDTH, HIDDEN), rank, kind == "shared", "cpu") for name in NAMES}
    for own in made.values():
        for tensor in own.named().values():
            tensor.fill_(9.0)  # as after an earlier sync
    return made


def routed(generator=None):
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    weights, ids = logits.softmax(-1).topk(CHOSEN)
    return ids, weights / weights.sum(-1, keepdim=True)


def product(x, gate_up, down, ids, weights, own):
    """A layer with its adapter by the twins, in the order of `expert_product.ExpertProduct`."""
    pairs = x.repeat_interleave(CHOSEN, 0)
    inner = torch.bmm(gate_up[ids.flatten()], pairs[:, :, None])[:, :, 0]
    h = x @ own.gate_up_a.t() if own.shared else expert_lora.shrink(x, own.gate_up_a, ids)
    act = expert_lora.activate(inner, h, own.gate_up_b, ids)
    y = torch.bmm(down[ids.flatten()], act[:, :, None])[:, :, 0] * weights.flatten()[:, None]
    h = expert_lora.shrink(act, own.down_a, ids)
    if own.shared:
        return expert_lora.combine(y, h, own.down_b, weights)
    return expert_lora.expand_(y, h, own.down_b, ids, weights).view(len(x), CHOSEN, -1).sum(1)


@pytest.mark.usefixtures("fresh_seed")
@pytest.mark.parametrize("kind", ["shared", "per_expert"])
def test_a_layer_with_its_adapter_is_the_loop_over_experts(kind):
    x, (ids, weights) = torch.randn(TOKENS, HIDDEN), routed()
    gate_up, down = 0.3 * torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), 0.3 * torch.randn(EXPERTS, HIDDEN, WIDTH)
    factors = random_factors(kind)
    a, b, c, d = (factor.detach() for factor in factors.tensors)
    own = ExpertBuffers(a, b * factors.scale, c, d * factors.scale)
    expected = loop(x, gate_up, down, ids, weights, (a, b, c, d, factors.scale))
    torch.testing.assert_close(product(x, gate_up, down, ids, weights, own).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_seed")
@pytest.mark.parametrize("kind", ["shared", "per_expert"])
def test_a_sync_leaves_nothing_but_the_factors(kind):
    given, buffers = tensors_of(kind), buffers_of(kind)
    slots = expert_slots(buffers)
    copy_to_experts_(of_experts(given, slots), slots, SCALE)
    for name, own in buffers.items():
        assert own.rank == 16
        for leaf, buffer in own.named().items():
            tensor = given[f"{name}.{leaf}"]
            rank = -2 if "lora_A" in leaf else -1
            expected = (tensor if rank == -2 else tensor * SCALE).bfloat16()
            assert torch.equal(buffer.narrow(rank, 0, RANK), expected)
            assert not buffer.narrow(rank, RANK, 16 - RANK).any()
    copy_to_experts_({}, slots, SCALE)  # an adapter on attention alone
    assert not any(buffer.any() for buffer in slots.values())


def _without(part):
    return lambda given: {name: tensor for name, tensor in given.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("layers.1"), "nothing for .*layers.1"),
        (_without("gate_up_proj.lora_B"), "nothing for .*gate_up_proj.lora_B"),
        (lambda given: {name.replace("layers.1", "layers.7"): each for name, each in given.items()}, "layers.7"),
        (lambda given: {name: each[..., :-1, :-1] for name, each in given.items()}, "trained on another base"),
        (lambda _: tensors_of("per_expert"), "of each expert, and the engine was opened for one shared"),
        (lambda _: tensors_of("shared", 20), "rank 20 on experts, the engine takes 16"),
    ],
)
def test_factors_that_do_not_fit_raise(change, message):
    with pytest.raises(EngineError, match=message):
        of_experts(change(tensors_of("shared")), expert_slots(buffers_of("shared")))


def test_an_engine_without_an_adapter_on_experts_says_so():
    with pytest.raises(EngineError, match="without an adapter on them"):
        of_experts(tensors_of("shared"), {})


def aligned(ids, block):
    """What vLLM's `moe_align_block_size` says of `ids`, in plain Python."""
    from qerl.engine.vllm.expert_kernels import Routing

    chosen, pairs, experts = ids.flatten().tolist(), [], []
    for expert in range(EXPERTS):
        own = [pair for pair, each in enumerate(chosen) if each == expert]
        own += [len(chosen)] * (-len(own) % block)
        pairs, experts = pairs + own, experts + [expert] * (len(own) // block)
    filler = [len(chosen)] * (2 * block)  # the tensors are longer than what counts
    numbers = (pairs + filler, [*experts, 77, 77], [len(pairs)])
    tensors = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in numbers)
    return Routing(*tensors, block, ids.numel(), ids.shape[1])


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.usefixtures("fresh_seed")
@pytest.mark.parametrize("block", [8, 16, 48])
def test_kernels_are_their_twins(block):
    from qerl.engine.vllm import expert_kernels

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    (ids, weights), rank, wide = routed(), 16, 80
    ids, weights = ids.to(DEVICE), weights.to(DEVICE)
    routing = aligned(ids, block)

    def drawn(*shape):
        return torch.randn(shape, device=DEVICE).to(dtype)

    def same(found, expected):
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4
        )

    pairs, a = TOKENS * CHOSEN, drawn(EXPERTS, rank, 200)
    for x in (drawn(TOKENS, 200), drawn(pairs, 200)):
        same(expert_kernels.shrink(x, a, routing), expert_lora.shrink(x, a, ids))
    inner, b = drawn(pairs, 2 * wide), drawn(EXPERTS, 2 * wide, rank)
    for h in (drawn(TOKENS, rank), drawn(pairs, rank)):
        same(expert_kernels.activate(inner, h, b, routing), expert_lora.activate(inner, h, b, ids))
    y, h, b = drawn(pairs, wide), drawn(pairs, rank), drawn(EXPERTS, wide, rank)
    same(expert_kernels.expand_(y.clone(), h, b, routing, weights), expert_lora.expand_(y.clone(), h, b, ids, weights))
    same(expert_kernels.combine(y, h, b[0], weights), expert_lora.combine(y, h, b[0], weights))
