"""The fused projections, their low-rank factors and frozen starts, and the gradients of the elementwise functions.

Linears that round their input, and adapters that are in their packed weight, have the gradients of autograd through a
dense fake quantization.
"""

from contextlib import nullcontext

import pytest
import torch

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter import adapter_tensors, attach_lora, base_linears, pack_in_
from qerl.engine.update import pack_weights_
from qerl.formats import NVFP4, all_formats
from qerl.formats.linear import swap_linears
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.activations import Activations, round_by_twin
from qerl.formats.nvfp4.kernel_layout import HUMMING_WGMMA, KernelLinear, KernelWeight, adjacent, release_work_buffers
from qerl.formats.nvfp4.linear import NVFP4Linear
from qerl.model import elementwise, lora, master, twins
from qerl.model.layers import fuse_
from qerl.model.lora import Part, lora_linear, parts_of
from qerl.model.master import LowRankSum, set_master_
from tests.helpers.layer_policies import TOKENS, policy_of, run, stock_, tiny_model
from tests.helpers.linear_twins import packed_nvfp4


def humming_words(packed):
    """The kernel's tensors for an NVFP4Tensor, by inverting the formulas of qerl/formats/nvfp4/kernel_layout.py."""
    codes = reference.unpack_codes(packed.packed).int()
    rows, columns = codes.shape
    n, k = torch.arange(rows)[:, None], torch.arange(columns)[None]
    column = 128 * (n // 64) + 4 * (4 * (n % 8) + k % 8 // 2) + n % 64 // 16
    nibble = 4 * (k % 2) + 2 * (k % 16 // 8) + n % 16 // 8
    words = torch.zeros(columns // 16, 2 * rows, dtype=torch.int64)
    words.index_put_((k // 16 + 0 * n, column), codes.long() << (4 * nibble), accumulate=True)
    n, block = torch.arange(rows)[:, None], torch.arange(columns // 16)[None]
    scales = torch.zeros(columns // 16, rows, dtype=torch.uint8)
    scales[block + 0 * n, 64 * (n // 64) + 8 * (n % 8) + n // 8 % 8 + 0 * block] = packed.block_scale.view(torch.uint8)
    return words.to(torch.int32), scales.view(torch.float8_e4m3fn)


SIZES = (96, 32, 64)


@pytest.fixture
def fused():
    """(KernelLinears with rows of one kernel tensor, their dense weights, no starts)."""
    torch.manual_seed(3)
    packed = reference.quantize(torch.randn(192, 48))
    words, scales = humming_words(packed)
    weight = KernelWeight(HUMMING_WGMMA, words, scales, 192, 48, float(packed.global_scale))
    biases = [torch.randn(96), None, torch.randn(64)]
    linears = [KernelLinear(weight, s, r, b) for s, r, b in zip((0, 96, 128), SIZES, biases, strict=True)]
    for linear in linears:
        linear.compute_dtype = torch.float32
    return linears, reference.dequantize(*packed, torch.float32).split(SIZES), [None] * 3


@pytest.fixture
def started():
    """The same of NVFP4 linears, two of which have a frozen start beside the base."""
    torch.manual_seed(7)
    linears, dense, starts = [], [], []
    for index, rows in enumerate(SIZES):
        packed = reference.quantize(torch.randn(rows, 48))
        linear = NVFP4Linear.of_buffers(packed.named(), (rows, 48), torch.randn(rows) if index != 1 else None, None)
        linear.start = (torch.randn(5, 48), torch.randn(rows, 5)) if index != 2 else None
        linears.append(linear)
        dense.append(reference.dequantize(*packed, torch.float32))
        starts.append(linear.start)
    return linears, dense, starts


def expected_of(x, group, adapters):
    """The product of a group with adapters by the place of their linear, each with a scale, in dense matrices."""
    terms = []
    for index, (linear, weight, start) in enumerate(zip(*group, strict=True)):
        total = weight if start is None else weight + start[1] @ start[0]
        terms.append(torch.nn.functional.linear(x, total, linear.bias))
        if index in adapters:
            a, b, scale = adapters[index]
            terms[-1] = terms[-1] + scale * (x @ a.t()) @ b.t()
    return torch.cat(terms, -1)


def test_a_fused_weight_is_decoded_at_once_and_its_buffer_is_reused(fused):
    linears, dense, _ = fused
    assert adjacent(linears)
    assert not adjacent(linears[::-1])
    assert not adjacent([linears[0], linears[2]])
    joined, _ = linears[0].unscaled(torch.float32, linears[1:])
    torch.testing.assert_close(joined * linears[0].kernel_weight.alpha, torch.cat(dense), rtol=1e-6, atol=0)
    assert linears[0].unscaled(torch.bfloat16)[0].data_ptr() == joined.data_ptr()
    release_work_buffers()
    torch.testing.assert_close(linears[1].dense(torch.float32), dense[1])


@pytest.mark.parametrize("adapted", [(0, 1, 2), (0, 2), (1,), ()], ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("kind", ["fused", "started"])
def test_a_group_with_starts_and_adapters_is_one_product(request, kind, adapted, kept):
    group = request.getfixturevalue(kind)
    torch.manual_seed(4)
    adapters = {
        i: (torch.randn(3, 48, requires_grad=True), torch.randn(SIZES[i], 3, requires_grad=True), 0.7) for i in adapted
    }
    x, upstream = torch.randn(2, 5, 48, requires_grad=True), torch.randn(2, 5, 192)
    parts = [Part(linear, *adapters.get(i, (None, None, 0.7))) for i, linear in enumerate(group[0])]
    leaves = [x, *(factor for a, b, _ in adapters.values() for factor in (a, b))]
    with lora.kept_factors() if kept else nullcontext():
        for _ in range(1 + kept):  # the second time the factors come from the cache
            out = lora_linear(x, parts)
            grads = torch.autograd.grad((out * upstream).sum(), leaves)
    expected = expected_of(x, group, adapters)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    for grad, right in zip(grads, torch.autograd.grad((expected * upstream).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trains", [False, True])
def test_a_linear_that_is_called_by_itself_has_its_start(started, trains):
    x = torch.randn(4, 48, requires_grad=trains)
    expected = expected_of(x, [part[:1] for part in started], {})
    out = started[0][0](x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    if trains:
        grads = [torch.autograd.grad(each.sum(), x) for each in (out, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_without_a_start_the_bits_are_those_of_before(started):
    linear = started[0][0]
    linear.start = None
    torch.manual_seed(9)
    a, b, x = torch.randn(3, 48), torch.randn(96, 3), torch.randn(6, 48)
    out = lora_linear(x, [Part(linear, a, b, 0.5)])
    plain = torch.addmm(linear.bias, x @ a.t(), b.t(), alpha=0.5)
    assert torch.equal(out, torch.addmm(plain, x, linear.dense(torch.float32).t()))


@pytest.mark.parametrize("scales", [(0.7, 0.7, 0.7), (0.7, 1.4, 0.35)], ids=["one scale", "three scales"])
def test_a_group_with_all_biases_adds_each_adapter_by_its_own_scale(fused, scales):
    """Of one scale biases and adapters are added in one product, which has a single factor."""
    linears = fused[0]
    linears[1].bias = torch.nn.Parameter(torch.randn(32), requires_grad=False)
    torch.manual_seed(5)
    adapters = {i: (torch.randn(3, 48), torch.randn(SIZES[i], 3), scale) for i, scale in enumerate(scales)}
    x = torch.randn(5, 48)
    out = lora_linear(x, [Part(linear, *adapters[i]) for i, linear in enumerate(linears)])
    torch.testing.assert_close(out, expected_of(x, fused, adapters), rtol=1e-5, atol=1e-5)


def test_gradients_of_the_elementwise_twins_follow_from_their_forwards():
    torch.manual_seed(6)
    x, w = torch.randn(5, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    upstream = torch.randn(5, 3, 8)
    plain = w * x * (x.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
    expected = torch.autograd.grad((plain * upstream).sum(), [x, w])
    out = elementwise.rms_norm(x, w, 1e-3)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(torch.autograd.grad((out * upstream).sum(), [x, w]), expected)

    inner = torch.randn(5, 12, requires_grad=True)
    gate, up = inner.chunk(2, -1)
    plain = torch.nn.functional.silu(gate) * up
    grad = torch.randn(5, 6)
    (expected,) = torch.autograd.grad((plain * grad).sum(), inner)
    torch.testing.assert_close(twins.swiglu_forward(inner.detach()), plain.detach())
    torch.testing.assert_close(twins.swiglu_backward_(inner.detach(), grad), expected)
    torch.testing.assert_close(grad, plain.detach())  # overwritten by the value of the forward pass


def test_rotation_follows_the_formula_as_do_its_gradients():
    """The formula takes the pairs (i, i + d/2) as complex numbers."""
    torch.manual_seed(8)
    counts, leaf = (4, 2, 3), torch.randn(7, 9 * 6, dtype=torch.float32, requires_grad=True)
    angle = torch.randn(7, 3)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    heads = leaf.unflatten(1, (9, 6)).split(counts, 1)
    turned = [torch.complex(*part.chunk(2, -1)) * torch.polar(torch.ones(7, 1, 3), angle[:, None]) for part in heads]
    expected = [*(torch.cat([part.real, part.imag], -1) for part in turned[:2]), heads[2]]
    parts = elementwise.rotary_parts_(leaf * 1.0, cos, sin, counts)
    upstream = [torch.randn(part.shape).transpose(0, 1).contiguous().transpose(0, 1) for part in parts]  # with strides
    for part, right in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, right)
    grads = [
        torch.autograd.grad(sum((p * u).sum() for p, u in zip(values, upstream, strict=True)), leaf)[0]
        for values in (parts, expected)
    ]
    torch.testing.assert_close(*grads)
    query = parts[0].detach()
    torch.testing.assert_close(elementwise.rotary_(query.clone(), cos, -sin), heads[0])


def test_a_hook_on_a_projection_still_sees_its_calls():
    policy = policy_of("qwen2")
    seen = []
    policy.get_base_model().model.layers[0].self_attn.k_proj.register_forward_hook(lambda *call: seen.append(call))
    logits = policy(TOKENS).logits
    assert len(seen) == 1
    torch.testing.assert_close(logits, stock_(policy)(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_a_trained_weight_makes_the_part_unknown(trained):
    linear = torch.nn.Linear(4, 4).requires_grad_(trained)
    assert (lora.part_of(linear) is None) == trained


def test_factors_are_cast_once_until_they_change():
    a, b = (torch.randn(3, 4), torch.randn(5, 4))
    with lora.kept_factors():
        both = lora.stacked((a, b), torch.bfloat16)
        assert torch.equal(both, torch.cat([a, b]).bfloat16())
        assert lora.stacked([a, b], torch.bfloat16) is both
        assert lora.stacked([a, b], torch.float16).dtype == torch.float16
        assert lora.stacked([a], torch.bfloat16) is lora.cast(a, torch.bfloat16)
        assert lora.cast(a, torch.float32) is a
        b.add_(1.0)
        assert torch.equal(lora.stacked([a, b], torch.bfloat16), torch.cat([a, b]).bfloat16())
        diagonal = lora.diagonal([a, b], torch.float32)
        assert lora.diagonal([a, b], torch.float32) is diagonal
    assert torch.equal(diagonal[:4, :3], a.t())
    assert torch.equal(diagonal[4:, 3:], b.t())
    assert not diagonal[:4, 3:].any()
    assert not diagonal[4:, :3].any()
    assert lora.cast(a, torch.bfloat16) is not lora.cast(a, torch.bfloat16)


def test_the_same_numbers_with_kept_factors():
    policy = policy_of("qwen2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, expected_grads = run(policy)
        with lora.kept_factors():
            for _ in range(2):
                logits, grads = run(policy)
                assert torch.equal(logits, expected)
                assert all(torch.equal(grad, expected_grads[name]) for name, grad in grads.items())


def rounded(x):
    """The oracle: the rounded value, with the gradient of the identity."""
    return x + (round_by_twin(x.detach()) - x).detach()


def rounding(rows, columns=48):
    linear = packed_nvfp4(torch.nn.Linear(columns, rows))
    linear.activations = Activations()
    return linear


@pytest.mark.parametrize("fused", [True, False])
def test_the_gradients_of_masters_and_adapters_are_those_of_a_rounded_input(fused):
    torch.manual_seed(0)
    linears, x = [rounding(32), rounding(16)], torch.randn(5, 48, requires_grad=True)
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


def test_linears_that_round_differently_are_not_computed_as_one():
    first, second = rounding(32), rounding(16)
    assert len(parts_of(first, second)) == 2
    second.activations = Activations(3.0)
    assert parts_of(first, second) is None


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


@pytest.mark.parametrize(
    "format", [each for each in all_formats() if each.quantized and each.writable], ids=lambda each: each.name
)
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
