"""Our layers against transformers' and PEFT's own path: outputs, gradients, and what is kept for the backward pass."""

import weakref
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.checkpoint.adapter import adapter_tensors, attach_lora
from qerl.layers import elementwise, factors, lora, twins
from qerl.layers.lora import Part, lora_linear
from qerl.layers.norms import set_norm_noise_
from qerl.layers.place import fuse_
from qerl.layers.recompute import checkpointed
from qerl.layers.saved import kept_bytes
from qerl.nvfp4 import reference
from qerl.nvfp4.kernel_layout import HUMMING_WGMMA, KernelWeight
from qerl.nvfp4.kernel_linear import KernelLinear, adjacent, release_work_buffers, unscaled
from qerl.nvfp4.linear import NVFP4Linear
from training.policy.train_memory import measure_layer

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
TOKENS = torch.randint(32, (2, 11), generator=torch.Generator().manual_seed(0))


def tiny_model(family, dtype=torch.float32, **changes):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.1,
        "pad_token_id": 0,
    }
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | changes)), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.requires_grad_(False).eval()


def stock_(policy):
    """Take our layers out of a policy: PEFT's forward, transformers' norms, attention and MLP."""
    from peft.tuners.lora.layer import Linear

    for module in policy.modules():
        module.__dict__.pop("forward", None)
        if isinstance(module, Linear):
            module.lora_part = lambda: None
        if isinstance(module, elementwise.RMSNorm):
            module.forward = lambda x, norm=module: twice_rounded(x, norm.weight, norm.variance_epsilon)
    return policy


def twice_rounded(x, weight, eps):
    """transformers' RMSNorm."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def policy_of(family, pack=False, **arguments):
    model = tiny_model(family, **arguments.pop("changes", {}))
    if pack:
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and "proj" in name:
                model.set_submodule(name, NVFP4Linear.from_linear(module))
    assert fuse_(model) == 2 * (5 if family != "qwen3" else 7) + 1
    policy = attach_lora(model, **({"rank": 4, "alpha": 6} | arguments))
    torch.manual_seed(2)
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.add_(0.2 * torch.randn_like(tensor))
    return policy.eval()


def difference(value, expected):
    """||value - expected|| / ||expected||."""
    assert expected.norm() > 0
    return ((value.float() - expected).norm() / expected.norm()).item()


def run(policy, tokens=TOKENS, **arguments):
    """Logits, gradients by name and the gradient to the embedded input."""
    policy.zero_grad()
    embedded = policy.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = policy(inputs_embeds=embedded, **arguments).logits
    torch.log_softmax(logits.float(), -1)[..., 3].sum().backward()
    grads = {name: tensor.grad.clone() for name, tensor in adapter_tensors(policy).items()}
    return logits.detach(), {**grads, "input": embedded.grad}


@pytest.mark.parametrize("pack", [False, True], ids=["dense", "nvfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_what_transformers_and_peft_do(family, pack):
    policy = policy_of(family, pack, train_norms=True)
    logits, grads = run(policy)
    expected_logits, expected = run(stock_(policy))
    assert difference(logits, expected_logits) < 1e-6
    assert len(grads) == 2 * (14 + 2) + 1
    assert max((difference(grad, expected[name]), name) for name, grad in grads.items()) < (3e-6, "")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_cache_and_masks_of_generation_work(family):
    policy = policy_of(family)
    arguments = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    ours = policy.generate(input_ids=TOKENS, attention_mask=mask, **arguments)
    stock = stock_(policy).generate(input_ids=TOKENS, attention_mask=mask, **arguments)
    assert ours.sequences.tolist() == stock.sequences.tolist()
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), rtol=1e-5, atol=1e-5)


def test_of_a_layer_that_recomputes_the_input_is_kept_in_16_bits():
    model = tiny_model("qwen2", torch.bfloat16)
    fuse_(model)
    policy = attach_lora(model, rank=4, alpha=6).train()
    logits, grads = run(policy)
    streams = []
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = partial(checkpointed, dtype=torch.bfloat16)
        layer.gradient_checkpointing = True
        layer.register_forward_pre_hook(lambda _, given: streams.append(weakref.ref(given[0])))
    out = policy(TOKENS).logits
    assert [stream() is None for stream in streams] == [False, True]  # the first is the embeddings, in 16 bits
    del out
    recomputed_logits, recomputed = run(policy)
    assert len(streams) == 2 * 3
    assert torch.equal(recomputed_logits, logits)
    differences = [difference(recomputed[name], grad.float()) for name, grad in grads.items() if grad.norm()]
    assert 0 < max(differences) < 0.02


def test_only_some_targets_and_checkpointing():
    policy = policy_of("qwen2", targets=("q_proj", "v_proj", "up_proj"))
    logits, grads = run(policy)
    policy.train()
    policy.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    _, recomputed = run(policy)
    policy.get_base_model().gradient_checkpointing_disable()
    expected_logits, expected = run(stock_(policy.eval()))
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        assert torch.equal(grad, recomputed[name])
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)


def test_without_its_adapter_the_policy_is_the_base():
    policy = policy_of("qwen2")
    base = tiny_model("qwen2")(TOKENS).logits
    with policy.disable_adapter():
        torch.testing.assert_close(policy(TOKENS).logits, base, rtol=1e-5, atol=1e-5)
    assert (policy(TOKENS).logits - base).abs().max() > 0.1


def test_what_is_not_plain_lora_takes_pefts_path():
    """Dropout draws, a merged adapter and a second active one each change what a layer computes."""
    policy = policy_of("qwen2", dropout=0.5)
    clean = policy(TOKENS).logits
    layer = policy.get_base_model().model.layers[0].mlp.gate_proj
    assert layer.lora_part() is not None
    policy.train()
    assert layer.lora_part() is None
    torch.manual_seed(5)
    dropped = policy(TOKENS).logits
    assert (dropped - clean).abs().max() > 0.1
    torch.manual_seed(5)
    torch.testing.assert_close(dropped, stock_(policy)(TOKENS).logits, rtol=1e-5, atol=1e-5)

    policy = policy_of("llama")
    clean = policy(TOKENS).logits
    policy.merge_adapter()
    torch.testing.assert_close(policy(TOKENS).logits, clean, rtol=1e-4, atol=1e-4)
    policy.unmerge_adapter()
    torch.testing.assert_close(policy(TOKENS).logits, clean, rtol=1e-4, atol=1e-4)


def test_a_second_adapter_is_the_one_that_acts_when_it_is_set():
    from peft import LoraConfig

    policy = policy_of("qwen2")
    clean = policy(TOKENS).logits
    policy.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj"]))
    torch.testing.assert_close(policy(TOKENS).logits, clean)
    policy.set_adapter("ref")  # its B is zero
    torch.testing.assert_close(policy(TOKENS).logits, tiny_model("qwen2")(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_it_is_as_close_to_float32_as_peft_is():
    """Over many tokens: of a few, by how a CPU rounds, either may be a fifth further away."""
    ours, stock = policy_of("qwen3"), stock_(policy_of("qwen3"))
    errors = {"ours": [], "stock": []}
    for tokens in torch.randint(32, (4, 8, 22), generator=torch.Generator().manual_seed(0)):
        expected, expected_grads = run(stock, tokens)
        for name, policy in (("ours", ours), ("stock", stock)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits, grads = run(policy, tokens)
            pairs = [(logits, expected), *((grads[key], expected_grads[key]) for key in grads)]
            errors[name] += [difference(*pair) for pair in pairs]
    assert max(errors["ours"]) < 0.1
    assert sum(errors["ours"]) < 1.1 * sum(errors["stock"])


def humming_words(packed):
    """The kernel's tensors of an NVFP4Tensor, by the formulas on top of qerl/nvfp4/kernel_layout.py, inverted."""
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
    """(KernelLinears of 96, 32 and 64 rows of one kernel's tensor, their dense weights, biases)."""
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
    joined = unscaled(linears, torch.float32)
    torch.testing.assert_close(joined * linears[0].kernel_weight.alpha, torch.cat(dense), rtol=1e-6, atol=0)
    assert unscaled(linears[:1], torch.bfloat16).data_ptr() == joined.data_ptr()
    release_work_buffers()
    torch.testing.assert_close(linears[1].dense(torch.float32), dense[1])


@pytest.mark.parametrize("adapted", [(0, 1, 2), (0, 2), ()], ids=str)
def test_a_group_is_its_parts(fused, adapted):
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
    torch.testing.assert_close(grad, plain.detach())  # overwritten by what the forward pass gave


def test_rotated_parts_are_the_formulas_with_their_gradients():
    """By the pairs (i, i + d/2) as complex numbers."""
    torch.manual_seed(8)
    counts, leaf = (4, 2, 3), torch.randn(7, 9 * 6, dtype=torch.float32, requires_grad=True)
    angle = torch.randn(7, 3)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    heads = leaf.unflatten(1, (9, 6)).split(counts, 1)
    turned = [torch.complex(*part.chunk(2, -1)) * torch.polar(torch.ones(7, 1, 3), angle[:, None]) for part in heads]
    expected = [*(torch.cat([part.real, part.imag], -1) for part in turned[:2]), heads[2]]
    parts = elementwise.rotary_parts_(leaf * 1.0, cos, sin, counts)
    upstream = [torch.randn(part.shape).transpose(0, 1).contiguous().transpose(0, 1) for part in parts]  # not adjacent
    for part, right in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, right)
    grads = [
        torch.autograd.grad(sum((p * u).sum() for p, u in zip(values, upstream, strict=True)), leaf)[0]
        for values in (parts, expected)
    ]
    torch.testing.assert_close(*grads)
    query = parts[0].detach()
    torch.testing.assert_close(elementwise.rotary_(query.clone(), cos, -sin), heads[0])


def test_a_norm_rounds_once():
    torch.manual_seed(7)
    x, w = torch.randn(64, 96).bfloat16(), (1 + 0.1 * torch.randn(96)).bfloat16()
    exact = (w.double() * x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).float()
    assert torch.equal(elementwise.rms_norm(x, w, 1e-6), exact.bfloat16())
    assert not torch.equal(twice_rounded(x, w, 1e-6), exact.bfloat16())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_layer_keeps_what_the_formula_says_and_half_of_what_it_did(family):
    """Proportions of the 7B model at a sixteenth of its width, rank 32 / 16."""
    changes = {
        "hidden_size": 224,
        "intermediate_size": 1184,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "initializer_range": 0.02,
    }
    policy = policy_of_sizes(family, changes)
    ours = measure_layer(policy)
    formula = kept_bytes(224, 1184, 224, 32, 2, head_norms=family == "qwen3")
    formula += 2 * 224 // 3  # of the last norm
    formula += 2 * 224  # the twin of flash attention joins its sequences' outputs, which it keeps as well
    stock = measure_layer(stock_(policy))
    assert ours == pytest.approx(formula, rel=0.03)
    assert ours < 0.55 * stock


def policy_of_sizes(family, changes):
    model = tiny_model(family, torch.bfloat16, **changes)
    fuse_(model)
    return attach_lora(model, rank=2, alpha=4)


def test_another_family_is_left_alone():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "gemma2", vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )
    )  # fmt: skip
    assert fuse_(model) == 0


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
    with factors.kept_factors():
        both = factors.stacked((a, b), torch.bfloat16)
        assert torch.equal(both, torch.cat([a, b]).bfloat16())
        assert factors.stacked([a, b], torch.bfloat16) is both
        assert factors.stacked([a, b], torch.float16).dtype == torch.float16
        assert factors.stacked([a], torch.bfloat16) is factors.cast(a, torch.bfloat16)
        assert factors.cast(a, torch.float32) is a
        b.add_(1.0)
        assert torch.equal(factors.stacked([a, b], torch.bfloat16), torch.cat([a, b]).bfloat16())
        diagonal = factors.diagonal([a, b], torch.float32)
        assert factors.diagonal([a, b], torch.float32) is diagonal
    assert torch.equal(diagonal[:4, :3], a.t())
    assert torch.equal(diagonal[4:, 3:], b.t())
    assert not diagonal[:4, 3:].any()
    assert not diagonal[4:, :3].any()
    assert factors.cast(a, torch.bfloat16) is not factors.cast(a, torch.bfloat16)


def test_the_same_numbers_with_kept_factors():
    policy = policy_of("qwen2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, expected_grads = run(policy)
        with factors.kept_factors():
            for _ in range(2):
                logits, grads = run(policy)
                assert torch.equal(logits, expected)
                assert all(torch.equal(grad, expected_grads[name]) for name, grad in grads.items())


@pytest.mark.parametrize("train_norms", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_is_never_rounded(family, train_norms):
    """As in the engine: what a layer reads, norms and adds to is the sum in float32; its linears read 16 bits."""
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


def test_of_a_trained_norm_the_one_acts_that_a_call_would_reach():
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


def test_a_sum_of_the_stream_has_the_gradients_of_one():
    x, y, delta = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, 3, 4)
    total = x + y
    elementwise.joined(total, (x, y), delta).backward(grad)
    assert all(torch.equal(leaf.grad, grad) for leaf in (x, y, delta))


def test_a_norm_beside_the_residual_stream_has_both_gradients():
    torch.manual_seed(9)
    x, delta = (torch.randn(2, 3, 8, requires_grad=True) for _ in range(2))
    norm = elementwise.RMSNorm(torch.nn.Parameter(torch.randn(8)), 1e-3)
    upstream = torch.randn(2, 2, 3, 8)
    for leaves, total in (((x, delta, norm.weight), x + delta), ((x, norm.weight), x)):
        expected = total, norm.weight * total * (total.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
        results = elementwise.norm_beside(x * 1.0, norm, delta * 1.0 if len(leaves) == 3 else None)
        for ours, right in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, right)
        grads = [
            torch.autograd.grad(sum((value * up).sum() for value, up in zip(pair, upstream, strict=True)), leaves)
            for pair in (results, expected)
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("leaf", ["input_layernorm", "post_attention_layernorm"])
def test_noise_acts_in_a_layers_norms(leaf):
    """The noise gives a norm another forward, which the layer has to call."""
    policy, other = policy_of("qwen2"), policy_of("qwen2")
    clean = policy(TOKENS).logits
    name, noise = f"model.layers.1.{leaf}", 0.1 * torch.randn(32)
    set_norm_noise_({name: policy.get_base_model().get_submodule(name)}, {name: noise})
    other.get_base_model().get_submodule(name).weight.data += noise
    noisy = policy(TOKENS).logits
    torch.testing.assert_close(noisy, other(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert (noisy - clean).abs().max() > 1e-2
