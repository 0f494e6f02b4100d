"""Our layers against those of transformers and PEFT: outputs, gradients, and what is kept for the backward pass."""

import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.checkpoint.adapter import attach_lora
from qerl.model.costs import kept_bytes
from qerl.model.layers import fuse_, recompute_by_
from tests.helpers.layer_policies import FAMILIES, TOKENS, difference, policy_of, run, stock_, tiny_model
from training.policy.train_memory import measure_layer


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


def test_without_its_adapter_the_policy_is_the_base():
    policy = policy_of("qwen2")
    base = tiny_model("qwen2")(TOKENS).logits
    with policy.disable_adapter():
        torch.testing.assert_close(policy(TOKENS).logits, base, rtol=1e-5, atol=1e-5)
    assert (policy(TOKENS).logits - base).abs().max() > 0.1


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
    policy.merge_adapter()
    torch.testing.assert_close(policy(TOKENS).logits, clean, rtol=1e-4, atol=1e-4)
    policy.unmerge_adapter()
    torch.testing.assert_close(policy(TOKENS).logits, clean, rtol=1e-4, atol=1e-4)


def test_a_second_adapter_acts_once_it_is_set():
    from peft import LoraConfig

    policy = policy_of("qwen2")
    clean = policy(TOKENS).logits
    policy.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj"]))
    torch.testing.assert_close(policy(TOKENS).logits, clean)
    policy.set_adapter("ref")  # its B is zero
    torch.testing.assert_close(policy(TOKENS).logits, tiny_model("qwen2")(TOKENS).logits, rtol=1e-5, atol=1e-5)


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
    changes = {
        "hidden_size": 224,
        "intermediate_size": 1184,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "initializer_range": 0.02,
    }
    policy = policy_of_sizes(family, changes)
    ours = measure_layer(policy.get_base_model())
    formula = kept_bytes(224, 1184, 224, 32, 2, head_norms=family == "qwen3")
    formula += 2 * 224 // 3  # for the last norm
    formula += 2 * 224  # the twin of flash attention concatenates the outputs of its sequences and keeps both
    stock = measure_layer(stock_(policy).get_base_model())
    assert ours == pytest.approx(formula, rel=0.03)
    assert ours < 0.55 * stock


def policy_of_sizes(family, changes):
    model = tiny_model(family, torch.bfloat16, **changes)
    fuse_(model)
    return attach_lora(model, rank=2, alpha=4)


def test_models_of_other_families_are_left_alone():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "gemma2", vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )
    )  # fmt: skip
    assert fuse_(model) == 0
