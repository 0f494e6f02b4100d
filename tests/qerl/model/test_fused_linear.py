"""The fused projections, their low-rank factors, and the gradients of the elementwise functions."""

import pytest
import torch

from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.kernel_layout import HUMMING_WGMMA, KernelWeight
from qerl.formats.nvfp4.linear import KernelLinear, adjacent, release_work_buffers
from qerl.model import elementwise, lora, twins
from qerl.model.lora import Part, lora_linear
from tests.helpers.layer_policies import TOKENS, policy_of, run, stock_


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


@pytest.fixture
def fused():
    """(KernelLinears with 96, 32 and 64 rows of one kernel tensor, their dense weights, their biases)."""
    torch.manual_seed(3)
    packed = reference.quantize(torch.randn(192, 48))
    words, scales = humming_words(packed)
    weight = KernelWeight(HUMMING_WGMMA, words, scales, 192, 48, float(packed.global_scale))
    biases = [torch.randn(96), None, torch.randn(64)]
    linears = [KernelLinear(weight, s, r, b) for (s, r), b in zip([(0, 96), (96, 32), (128, 64)], biases, strict=True)]
    for linear in linears:
        linear.compute_dtype = torch.float32
    return linears, reference.dequantize(*packed, torch.float32).split([96, 32, 64]), biases


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


@pytest.mark.parametrize("adapted", [(0, 1, 2), (0, 2), ()], ids=str)
def test_a_fused_group_computes_the_same_as_its_parts(fused, adapted):
    linears, dense, biases = fused
    torch.manual_seed(4)
    factors = {
        i: (torch.randn(3, 48, requires_grad=True), torch.randn(linears[i].out_features, 3, requires_grad=True))
        for i in adapted
    }
    x = torch.randn(2, 5, 48, requires_grad=True)
    parts = [Part(linear, *factors.get(i, (None, None)), 0.7) for i, linear in enumerate(linears)]
    upstream = torch.randn(2, 5, 192)
    leaves = [x, *(factor for pair in factors.values() for factor in pair)]
    out = lora_linear(x, parts)
    grads = torch.autograd.grad((out * upstream).sum(), leaves)
    terms = [torch.nn.functional.linear(x, w, b) for w, b in zip(dense, biases, strict=True)]
    for i, (a, b) in factors.items():
        terms[i] = terms[i] + 0.7 * (x @ a.t()) @ b.t()
    expected = torch.cat(terms, -1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for grad, right in zip(grads, torch.autograd.grad((expected * upstream).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scales", [(0.7, 0.7, 0.7), (0.7, 1.4, 0.35)], ids=["one scale", "three scales"])
def test_a_group_with_all_biases_adds_each_adapter_by_its_own_scale(fused, scales):
    """Of one scale biases and adapters are added in one product, which has a single factor."""
    linears, dense, biases = fused
    linears[1].bias = torch.nn.Parameter(torch.randn(32), requires_grad=False)
    biases = [biases[0], linears[1].bias, biases[2]]
    torch.manual_seed(5)
    factors = [(torch.randn(3, 48), torch.randn(linear.out_features, 3)) for linear in linears]
    x = torch.randn(5, 48)
    given = list(zip(linears, factors, scales, dense, biases, strict=True))
    out = lora_linear(x, [Part(linear, *each, scale) for linear, each, scale, _, _ in given])
    terms = [x @ w.t() + bias + scale * (x @ a.t()) @ b.t() for _, (a, b), scale, w, bias in given]
    torch.testing.assert_close(out, torch.cat(terms, -1), rtol=1e-5, atol=1e-5)


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
