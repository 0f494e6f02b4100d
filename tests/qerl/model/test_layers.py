"""Our layers against those of transformers and PEFT: outputs, gradients, and what is kept for the backward pass."""

import weakref

import pytest
import torch
from peft import LoraConfig

from qerl.checkpoint.adapter import attach_lora
from qerl.model import elementwise
from qerl.model.costs import kept_bytes
from qerl.model.layers import fuse_, recompute_by_
from qerl.model.norms import set_norm_noise_
from tests.helpers.layer_policies import FAMILIES, TOKENS, difference, policy_of, run, stock_, tiny_model, twice_rounded
from training.policy.train_memory import measure_layer

HYBRID = "qwen3_5_text"
STATES = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "num_hidden_layers": 4,
}


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


def test_a_layer_that_recomputes_keeps_its_input_in_16_bits():
    model = tiny_model("qwen2", torch.bfloat16)
    fuse_(model)
    policy = attach_lora(model, rank=4, alpha=6).train()
    logits, grads = run(policy)
    streams = []
    for layer in model.model.layers:
        recompute_by_(layer, torch.bfloat16)
        layer.gradient_checkpointing = True
        layer.register_forward_pre_hook(lambda _, given: streams.append(weakref.ref(given[0])))
    out = policy(TOKENS).logits
    assert [stream() is None for stream in streams] == [False, True]  # the first one, the embeddings, is in 16 bits
    del out
    recomputed_logits, recomputed = run(policy)
    assert len(streams) == 2 * 3
    assert torch.equal(recomputed_logits, logits)
    differences = [difference(recomputed[name], grad.float()) for name, grad in grads.items() if grad.norm()]
    assert 0 < max(differences) < 0.02


def test_with_only_some_targets_and_with_checkpointing():
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


def test_without_its_adapter_or_with_a_second_one_of_zeros_the_policy_is_the_base():
    policy = policy_of("qwen2")
    base, clean = tiny_model("qwen2")(TOKENS).logits, policy(TOKENS).logits
    assert (clean - base).abs().max() > 0.1
    with policy.disable_adapter():
        torch.testing.assert_close(policy(TOKENS).logits, base, rtol=1e-5, atol=1e-5)
    policy.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj"]))
    torch.testing.assert_close(policy(TOKENS).logits, clean)
    policy.set_adapter("ref")  # its B is zero
    torch.testing.assert_close(policy(TOKENS).logits, base, rtol=1e-5, atol=1e-5)


def test_anything_but_plain_lora_takes_the_path_of_peft():
    """Dropout, a merged adapter and a second active adapter each change what a layer computes."""
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
    for change in (policy.merge_adapter, policy.unmerge_adapter):
        change()
        torch.testing.assert_close(policy(TOKENS).logits, clean, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_it_is_as_close_to_float32_as_peft_is():
    """This holds over many tokens. Over a few, depending on how a CPU rounds, either may be a fifth further away."""
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


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_layer_keeps_what_the_formula_says_and_half_of_what_stock_layers_keep(family):
    """The proportions of the 7B model at a sixteenth of its width, with rank 32 / 16."""
    sizes = {"hidden_size": 224, "intermediate_size": 1184, "num_attention_heads": 28, "num_key_value_heads": 4}
    model = tiny_model(family, torch.bfloat16, **sizes, num_hidden_layers=3, initializer_range=0.02)
    fuse_(model)
    policy = attach_lora(model, rank=2, alpha=4)
    ours = measure_layer(policy.get_base_model())
    formula = kept_bytes(224, 1184, 224, 32, 2, head_norms=family == "qwen3")
    formula += 2 * 224 // 3  # for the last norm
    formula += 2 * 224  # the twin of flash attention concatenates the outputs of its sequences and keeps both
    stock = measure_layer(stock_(policy).get_base_model())
    assert ours == pytest.approx(formula, rel=0.03)
    assert ours < 0.55 * stock


def test_models_of_other_families_are_left_alone():
    assert fuse_(tiny_model("gemma2")) == 0


def test_a_norm_rounds_once():
    torch.manual_seed(7)
    x, w = torch.randn(64, 96).bfloat16(), (1 + 0.1 * torch.randn(96)).bfloat16()
    exact = (w.double() * x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).float()
    assert torch.equal(elementwise.rms_norm(x, w, 1e-6), exact.bfloat16())
    assert not torch.equal(twice_rounded(x, w, 1e-6), exact.bfloat16())


@pytest.mark.parametrize("train_norms", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(("family", "number"), [*((family, 1) for family in FAMILIES), (HYBRID, 1), (HYBRID, 3)])
def test_the_residual_stream_is_never_rounded(family, number, train_norms):
    """As in the engine, a layer reads, normalizes and adds to the sum in float32; its linears read 16 bits. Of Qwen3.5
    the second layer has linear attention, and the gain of its norms is 1 + weight."""
    model = tiny_model(family, torch.bfloat16, **(STATES if family == HYBRID else {}))
    fuse_(model)
    attach_lora(model, rank=4, alpha=6, train_norms=train_norms)
    layer, seen = model.model.layers[number], {}
    attention = "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"
    assert (attention == "linear_attn") == (family == HYBRID and number == 1)
    keep = lambda name: lambda module, inputs, kwargs, out: seen.update({name: (inputs, out)})  # noqa: E731
    for name in (attention, "mlp"):
        getattr(layer, name).register_forward_hook(keep(name), with_kwargs=True)
    layer.register_forward_hook(keep("layer"), with_kwargs=True)
    logits = model(TOKENS).logits
    (x,), out = seen["layer"]
    assert x.dtype == torch.float32
    assert not torch.equal(x, x.bfloat16().float())
    attended, (normed,), inner = seen[attention][1], *seen["mlp"]
    attended = attended if torch.is_tensor(attended) else attended[0]
    total = x + attended.float()
    assert {value.dtype for value in (attended, normed, inner, logits)} == {torch.bfloat16}
    assert torch.equal(normed, layer.post_attention_layernorm(total))
    assert torch.equal(out, total + inner.float())
    if family == HYBRID and not train_norms:
        stock = type(tiny_model(family, **STATES).model.norm)(32)
        stock.weight.data = layer.post_attention_layernorm.weight.float()
        torch.testing.assert_close(normed.float(), stock(total), rtol=1e-2, atol=1e-2)


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
