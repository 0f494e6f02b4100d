"""The residual stream and the norms that read it."""

import pytest
import torch

from qerl.checkpoint.adapter import attach_lora
from qerl.model import elementwise
from qerl.model.layers import fuse_
from qerl.model.norms import set_norm_noise_
from tests.helpers.layer_policies import FAMILIES, TOKENS, policy_of, tiny_model, twice_rounded


def test_a_norm_rounds_once():
    torch.manual_seed(7)
    x, w = torch.randn(64, 96).bfloat16(), (1 + 0.1 * torch.randn(96)).bfloat16()
    exact = (w.double() * x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).float()
    assert torch.equal(elementwise.rms_norm(x, w, 1e-6), exact.bfloat16())
    assert not torch.equal(twice_rounded(x, w, 1e-6), exact.bfloat16())


@pytest.mark.parametrize("train_norms", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_is_never_rounded(family, train_norms):
    """As in the engine, a layer reads, normalizes and adds to the sum in float32; its linears read 16 bits."""
    model = tiny_model(family, torch.bfloat16)
    fuse_(model)
    attach_lora(model, rank=4, alpha=6, train_norms=train_norms)
    layer, seen = model.model.layers[1], {}
    keep = lambda name: lambda module, inputs, kwargs, out: seen.update({name: (inputs, out)})  # noqa: E731
    for name in ("self_attn", "mlp"):
        getattr(layer, name).register_forward_hook(keep(name), with_kwargs=True)
    layer.register_forward_hook(keep("layer"), with_kwargs=True)
    logits = model(TOKENS).logits
    (x,), out = seen["layer"]
    assert x.dtype == torch.float32
    assert not torch.equal(x, x.bfloat16().float())
    attended, (normed,), inner = seen["self_attn"][1][0], *seen["mlp"]
    total = x + attended.float()
    assert {value.dtype for value in (attended, normed, inner, logits)} == {torch.bfloat16}
    assert torch.equal(normed, layer.post_attention_layernorm(total))
    assert torch.equal(out, total + inner.float())


def test_of_a_trained_norm_that_copy_acts_that_a_call_would_reach():
    policy = policy_of("llama", train_norms=True)
    trained = policy(TOKENS).logits
    with policy.disable_adapter():
        original = policy(TOKENS).logits
    torch.testing.assert_close(original, tiny_model("llama")(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert (trained - original).abs().max() > 0.1
    norm = policy.get_base_model().model.layers[1].post_attention_layernorm
    assert norm.acting() is norm.modules_to_save["default"]
    seen = []
    norm.modules_to_save["default"].register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(policy(TOKENS).logits, trained, rtol=1e-5, atol=1e-5)
    assert seen == [1]


def test_a_sum_in_the_stream_has_the_gradients_of_a_sum():
    x, y, delta = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, 3, 4)
    total = x + y
    elementwise.exact_sum(total, (x, y), delta).backward(grad)
    assert all(torch.equal(leaf.grad, grad) for leaf in (x, y, delta))


def test_a_norm_beside_the_residual_stream_has_both_gradients():
    torch.manual_seed(9)
    x, delta = (torch.randn(2, 3, 8, requires_grad=True) for _ in range(2))
    norm = elementwise.RMSNorm(torch.nn.Parameter(torch.randn(8)), 1e-3)
    upstream = torch.randn(2, 2, 3, 8)
    for leaves, total in (((x, delta, norm.weight), x + delta), ((x, norm.weight), x)):
        expected = total, norm.weight * total * (total.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
        results = elementwise.add_and_norm(x * 1.0, norm, delta * 1.0 if len(leaves) == 3 else None)
        for ours, right in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, right)
        grads = [
            torch.autograd.grad(sum((value * up).sum() for value, up in zip(pair, upstream, strict=True)), leaves)
            for pair in (results, expected)
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("leaf", ["input_layernorm", "post_attention_layernorm"])
def test_noise_acts_in_a_layers_norms(leaf):
    """Noise replaces the forward function of a norm, which the layer then has to call."""
    policy, other = policy_of("qwen2"), policy_of("qwen2")
    clean = policy(TOKENS).logits
    name, noise = f"model.layers.1.{leaf}", 0.1 * torch.randn(32)
    set_norm_noise_({name: policy.get_base_model().get_submodule(name)}, {name: noise})
    other.get_base_model().get_submodule(name).weight.data += noise
    noisy = policy(TOKENS).logits
    torch.testing.assert_close(noisy, other(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert (noisy - clean).abs().max() > 1e-2
