"""Our Triton kernels and their twins: the adapter on experts, the draw of a token, what stands between products.

The adapter's products are those of the trainer, and the sync fills its buffers. The twin of the draw is compared with
the softmax. The kernels are compared with the twins on a card, or (experts) with `TRITON_INTERPRET=1 pytest -m gpu` by
Triton's interpreter. Last run on an H200 on 2026-11-23.
"""

import os

import pytest
import torch
import torch.nn.functional as F

from qerl.base.errors import EngineError
from qerl.base.philox import WORD, Words, philox
from qerl.engine.vllm import twins
from qerl.engine.vllm.sync import ExpertBuffers, copy_to_experts_, expert_slots, of_experts
from qerl.engine.vllm.twins import BLOCK, QUARTER, gumbel, reference_draw, row_keys
from tests.helpers.expert_layers import EXPERTS, HIDDEN, RANK, WIDTH, loop, random_factors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
TOKENS, CHOSEN, SCALE = 7, 2, 0.5

if INTERPRETED or torch.cuda.is_available():
    from qerl.engine.vllm import kernels


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


def routed():
    weights, ids = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(CHOSEN)
    return ids, weights / weights.sum(-1, keepdim=True)


def product(x, gate_up, down, ids, weights, own):
    """A layer with its adapter by the twins, in the order of `expert_product.ExpertProduct`."""
    inner = torch.bmm(gate_up[ids.flatten()], x.repeat_interleave(CHOSEN, 0)[:, :, None])[:, :, 0]
    h = x @ own.gate_up_a.t() if own.shared else twins.shrink(x, own.gate_up_a, ids)
    act = twins.activate(inner, h, own.gate_up_b, ids)
    y = torch.bmm(down[ids.flatten()], act[:, :, None])[:, :, 0] * weights.flatten()[:, None]
    h = twins.shrink(act, own.down_a, ids)
    if own.shared:
        return twins.combine(y, h, own.down_b, weights)
    return twins.expand_(y, h, own.down_b, ids, weights).view(len(x), CHOSEN, -1).sum(1)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: {name: given[name] for name in given if "layers.1" not in name}, "nothing for .*layers.1"),
        (lambda given: {name.replace("layers.1", "layers.7"): each for name, each in given.items()}, "layers.7"),
        (lambda given: {name: each[..., :-1, :-1] for name, each in given.items()}, "trained on another base"),
        (lambda _: tensors_of("per_expert"), "another kind of adapter on experts"),
        (lambda _: tensors_of("shared", 20), "for a smaller rank"),
    ],
)
def test_factors_that_do_not_fit_raise(change, message):
    with pytest.raises(EngineError, match=message):
        of_experts(change(tensors_of("shared")), expert_slots(buffers_of("shared")))
    with pytest.raises(EngineError, match="without an adapter on them"):
        of_experts(tensors_of("shared"), {})


def aligned(ids, block):
    """What vLLM's `moe_align_block_size` says of `ids`, in plain Python."""
    chosen, pairs, experts = ids.flatten().tolist(), [], []
    for expert in range(EXPERTS):
        own = [pair for pair, each in enumerate(chosen) if each == expert]
        own += [len(chosen)] * (-len(own) % block)
        pairs, experts = pairs + own, experts + [expert] * (len(own) // block)
    filler = [len(chosen)] * (2 * block)  # the tensors are longer than what counts
    numbers = (pairs + filler, [*experts, 77, 77], [len(pairs)])
    tensors = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in numbers)
    return kernels.Routing(*tensors, block, ids.numel(), ids.shape[1])


@pytest.mark.gpu(instead=INTERPRETED)
@pytest.mark.usefixtures("fresh_seed")
@pytest.mark.parametrize("block", [8, 16, 48])
def test_kernels_are_their_twins(block):
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    (ids, weights), rank, wide = routed(), 16, 80
    ids, weights = ids.to(DEVICE), weights.to(DEVICE)
    routing = aligned(ids, block)

    def drawn(*shape):
        return torch.randn(shape, device=DEVICE).to(dtype)

    def same(found, expected):
        bound = 1e-4 if INTERPRETED else 2e-2
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=bound)

    pairs, a = TOKENS * CHOSEN, drawn(EXPERTS, rank, 200)
    for x in (drawn(TOKENS, 200), drawn(pairs, 200)):
        same(kernels.shrink(x, a, routing), twins.shrink(x, a, ids))
    inner, b = drawn(pairs, 2 * wide), drawn(EXPERTS, 2 * wide, rank)
    for h in (drawn(TOKENS, rank), drawn(pairs, rank)):
        same(kernels.activate(inner, h, b, routing), twins.activate(inner, h, b, ids))
    y, h, b = drawn(pairs, wide), drawn(pairs, rank), drawn(EXPERTS, wide, rank)
    same(kernels.expand_(y.clone(), h, b, routing, weights), twins.expand_(y.clone(), h, b, ids, weights))
    same(kernels.combine(y, h, b[0], weights), twins.combine(y, h, b[0], weights))


GREEDY = 0.0


def test_a_key_has_the_64_bits_of_seed_and_position():
    seeds = torch.tensor([0x299F31D0A4093822, -1, 0])
    positions = torch.tensor([0, 2**40 + 5, 0])
    keys = row_keys(seeds, positions)
    one = [torch.tensor([word]) for word in (5, 2**8, 0, 0)]
    assert keys.first[1] == philox(Words(*one), (torch.tensor([WORD]),) * 2).first
    assert keys.first[2] == 0x6627E8D5
    others = row_keys(seeds, positions + 1), row_keys(seeds + 1, positions)
    assert len(torch.cat([word for each in (keys, *others) for word in each[:2]]).unique()) == 18


def test_the_noise_has_a_standard_gumbel_distribution():
    """A Gumbel variable has the mean gamma (Euler's) and the variance pi^2 / 6. No two logits of a row share a word."""
    noise = gumbel(torch.tensor([3, 4]), BLOCK - 7)
    assert noise.shape == (2, BLOCK - 7)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.1)
    assert all(len(row.unique()) > 0.999 * len(row) for row in noise)
    assert torch.equal(gumbel(torch.tensor([4]), 100)[0], noise[1, :100])
    assert noise.isfinite().all()


def drawn(logits, temperature=1.0, seed=1, first=0):
    """A token and its logprob for each row; positions start at `first`."""
    positions = torch.arange(first, first + len(logits))
    request = torch.zeros(len(logits), dtype=torch.int32)
    return reference_draw(logits, request, torch.tensor([temperature]), torch.tensor([seed]), positions)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_as_frequent_as_the_softmax_says(temperature):
    """Tokens are in each quarter of two blocks. A chi-square of 9 degrees is above 33.7 in one of 10,000 cases."""
    some = torch.tensor([0, 1, 900, QUARTER, 2000, 3 * QUARTER - 1, BLOCK - 1, BLOCK, BLOCK + 500, BLOCK + QUARTER])
    logits = torch.full((BLOCK + QUARTER + 1,), -1e4)
    logits[some] = temperature * torch.linspace(0, 2, len(some))
    tokens, _ = drawn(logits.expand(600, -1), temperature)
    observed = (tokens[:, None] == some).sum(0)
    expected = 600 * torch.linspace(0, 2, len(some)).softmax(0)
    assert observed.sum() == 600
    assert ((observed - expected) ** 2 / expected).sum() < 33.7


def test_the_logprob_is_that_of_the_drawn_token():
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * 3
    tokens, logprobs = drawn(logits, 0.7)
    expected = torch.log_softmax(logits / 0.7, 1)[torch.arange(40), tokens]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert len(tokens.unique()) > 20


def test_at_temperature_zero_the_first_of_the_largest_logits_is_taken():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    logits[:, 7], logits[:, 90] = 9.0, 9.0
    tokens, logprobs = drawn(logits, GREEDY)
    assert tokens.tolist() == [7] * 5
    torch.testing.assert_close(logprobs, logits.log_softmax(1)[:, 7])


def test_a_seed_and_a_position_determine_the_tokens_and_others_give_others():
    logits = torch.zeros(30, 1000)
    tokens, _ = drawn(logits, seed=11)
    assert torch.equal(drawn(logits, seed=11)[0], tokens)
    assert (drawn(logits, seed=12)[0] == tokens).sum() < 5
    assert torch.equal(drawn(logits, seed=11, first=10)[0][:20], tokens[10:])  # in whatever row it is
    assert len(tokens.unique()) > 25


def random_batch(rows, vocabulary, dtype):
    """The inputs of a step: rows of a wider tensor, whose other columns would win, and requests from a larger table."""
    wide = torch.full((rows, vocabulary + 24), 1e30, device="cuda", dtype=dtype)
    logits = wide[:, :vocabulary].normal_(0, 3)
    logits[1:2, :BLOCK] = float("-inf")
    table = 2 * rows + 3
    request = torch.randperm(table, device="cuda")[:rows].int()
    temperature = torch.rand(table, device="cuda") * 1.7 + 0.3
    temperature[request[2::4]] = GREEDY
    seeds = torch.randint(-(2**63), 2**63 - 1, (table,), device="cuda")
    positions = torch.randint(2**20, (rows,), device="cuda")
    return logits, request, temperature, seeds, positions


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("vocabulary", [5003, 152064])
@pytest.mark.parametrize("rows", [1, 7, 128])
def test_the_kernels_draw_what_the_twin_draws(fresh_seed, rows, vocabulary, dtype):
    """The same block and token, unless two are equal within float32 rounding, and the logprob of that token."""
    logits, request, temperature, seeds, positions = batch = random_batch(rows, vocabulary, dtype)
    tokens, logprobs = kernels.draw(*batch)
    expected, _ = reference_draw(*batch)
    assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    greedy = temperature[request] == GREEDY
    assert torch.equal(tokens[greedy], expected[greedy])
    scaled = logits.double() / torch.where(greedy, 1.0, temperature[request]).double()[:, None]
    which, keys = torch.arange(rows, device="cuda"), row_keys(seeds[request], positions)
    blocks = F.pad(scaled, (0, -vocabulary % BLOCK), value=float("-inf")).unflatten(1, (-1, BLOCK))
    of_blocks = torch.where(greedy[:, None], blocks.amax(2), blocks.logsumexp(2) + gumbel(keys.second, blocks.shape[1]))
    block, inside = tokens // BLOCK, tokens % BLOCK
    assert (of_blocks.amax(1) - of_blocks[which, block] < 1e-4).all()
    noisy = blocks[which, block] + gumbel(keys.first, BLOCK).masked_fill_(greedy[:, None], 0.0)
    assert (noisy.amax(1) - noisy[which, inside] < 1e-4).all()
    assert (tokens == expected).float().mean() > 0.95
    torch.testing.assert_close(logprobs.double(), scaled.log_softmax(1)[which, tokens], rtol=0, atol=1e-4)
    again = kernels.draw(*batch)
    assert torch.equal(again[0], tokens)
    assert torch.equal(again[1], logprobs)


@pytest.mark.gpu
def test_a_nan_among_the_logits_is_in_the_logprob():
    batch = random_batch(3, 9000, torch.float32)
    batch[0][:, 5000] = float("nan")
    assert kernels.draw(*batch)[1].isnan().all()


@pytest.mark.gpu
def test_another_number_of_sequences_compiles_no_further_kernel(compiled):
    kernels.draw(*random_batch(16, 5003, torch.bfloat16))
    compiled.clear()
    for rows in (1, 7, 32, 33, 128):
        kernels.draw(*random_batch(rows, 5003, torch.bfloat16))
    assert compiled == []


def rows_of(tokens, columns, seed=0, dtype=torch.bfloat16, device=DEVICE):
    """Rows of a wider tensor, as the parts of a fused product are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns + 32, generator=generator).to(device, dtype)[:, :columns]


def angles_of(positions, half):
    """A table of cosines and sines, one row per position."""
    angle = torch.arange(positions)[:, None] / 1000.0 ** (torch.arange(half) / half)
    return torch.cat((angle.cos(), angle.sin()), 1)


def test_the_twin_of_the_rotation_is_the_model_s():
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    q, k, positions = torch.randn(5, 3 * 8), torch.randn(5, 8), torch.tensor([4, 0, 9, 2, 2])
    table = angles_of(10, 4)
    cos, sin = (part.repeat(1, 2)[positions][None] for part in table.chunk(2, 1))
    split = [rows.view(1, 5, -1, 8).transpose(1, 2) for rows in (q, k)]
    expected = [rows.transpose(1, 2).reshape(5, -1) for rows in apply_rotary_pos_emb(*split, cos, sin)]
    twins.rotate_(positions, q, k, table, 8)
    torch.testing.assert_close((q, k), tuple(expected))


def test_columns_beyond_the_table_are_not_rotated():
    q, k = torch.randn(3, 16), torch.randn(3, 8)
    before = q.clone()
    twins.rotate_(torch.tensor([1, 2, 3]), q, k, angles_of(4, 2), 8)
    kept = torch.arange(16) % 8 >= 4
    assert torch.equal(q[:, kept], before[:, kept])
    assert not torch.equal(q, before)


def test_the_twins_of_norm_and_activation_round_once():
    x, (residual, gain) = rows_of(4, 96, device="cpu"), torch.randn(5, 96).split([4, 1])
    wide = x.double() + residual.double()
    right = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    out, stream = twins.add_norm(x, residual, gain, 1e-6)
    torch.testing.assert_close(stream, wide.float())
    torch.testing.assert_close(out.double(), right, rtol=2.0**-8, atol=0)
    gate, up = x.double().chunk(2, 1)
    torch.testing.assert_close(twins.swiglu(x).double(), gate * gate.sigmoid() * up, rtol=2.0**-8, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("columns", [64, 3584, 5120])
def test_the_norm_is_its_twin(tokens, columns):
    x, gain = rows_of(tokens, columns), 1 + rows_of(1, columns, 1, torch.float32)[0]
    residual = rows_of(tokens, columns, 2, torch.float32).contiguous()
    for before in (None, residual, residual.bfloat16()):
        found, right = kernels.add_norm(x, before, gain, 1e-6), twins.add_norm(x, before, gain, 1e-6)
        torch.testing.assert_close(found, right, rtol=2.0**-7, atol=1e-6)
    heads = rows_of(tokens, columns).unflatten(1, (-1, 32))  # of which each has a norm of its own
    found, right = (norm(heads, None, gain[:32], 1e-6)[0] for norm in (kernels.add_norm, twins.add_norm))
    torch.testing.assert_close(found, right, rtol=2.0**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("columns", [48, 2048, 18944])
def test_the_activation_is_its_twin(tokens, columns):
    x = (3 * rows_of(tokens, 2 * columns)).contiguous()
    torch.testing.assert_close(kernels.swiglu(x), twins.swiglu(x), rtol=2.0**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize(("heads", "head_dim", "half"), [((28, 4), 128, 64), ((9, 3), 64, 32), ((2, 2), 96, 24)])
def test_the_rotation_is_its_twin(tokens, heads, head_dim, half):
    table = angles_of(500, half).bfloat16().to(DEVICE)
    positions = torch.randint(500, (tokens,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    whole = rows_of(tokens, sum(heads) * head_dim)  # q and k are parts of one product
    found, right = whole.clone(), whole.clone()
    for rotate, rows in ((kernels.rotate_, found), (twins.rotate_, right)):
        q, k = rows.split([count * head_dim for count in heads], 1)
        rotate(positions, q, k, table, head_dim)
    torch.testing.assert_close(found, right, rtol=2.0**-7, atol=1e-5)
