"""Packed linears in a transformers model with PEFT, against a model of their dense twins."""

import copy

import pytest
import torch
from torch import nn

from qerl.base.errors import CheckpointError, QerlError
from qerl.formats import NVFP4
from qerl.formats.linear import cached_weights, swap_linears
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.linear import NVFP4Linear
from tests.helpers.linear_twins import assert_same_bits

DTYPES = [torch.float32, torch.bfloat16]


# --- swapping, in a transformers model under PEFT


def tiny_model(dtype=torch.float32):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=64, tie_word_embeddings=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers initializes them to zero
            nn.init.normal_(parameter)
    return model.to(dtype).requires_grad_(False).eval()


def packed_model_and_twin(dtype=torch.float32):
    """A tiny Qwen2 whose projections are packed, filled from a saved state, and its dense twin."""
    twin = tiny_model(dtype)
    names = [name for name, module in twin.named_modules() if name.endswith("_proj")]
    state = dict(twin.state_dict())
    for name in names:
        tensors = reference.quantize(state.pop(f"{name}.weight"))
        state.update({f"{name}.{key}": tensor for key, tensor in tensors.named().items()})
        twin.get_submodule(name).weight.copy_(reference.dequantize(*tensors, dtype))
    model = tiny_model(dtype)
    assert swap_linears(model, names, NVFP4) == len(names) == 14
    model.load_state_dict(state)
    return model, twin


def test_a_swapped_model_generates_the_same_as_its_twin():
    model, twin = packed_model_and_twin()
    prompt = torch.randint(0, 64, (2, 5))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with cached_weights(model) as cache:
        cached = model.generate(prompt, **settings)
        assert cache.bytes == 4 * sum(module.weight.numel() for name, module in twin.named_modules() if "_proj" in name)
    assert torch.equal(cached, twin.generate(prompt, **settings))
    assert torch.equal(model.generate(prompt, **settings), cached)
    assert torch.equal(model(prompt).logits, twin(prompt).logits)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no quantized linear"),
        (["model.layers.9.mlp.up_proj"], "NoneType"),
        (["model.norm"], "Qwen2RMSNorm"),
        (["model.layers.0.mlp.up_proj", "model.layers.0.mlp"], "Qwen2MLP"),
    ],
)
def test_swapping_a_missing_linear_raises_and_changes_nothing(names, message):
    model = tiny_model()
    with pytest.raises(CheckpointError, match=message):
        swap_linears(model, names, NVFP4)
    assert not any(isinstance(module, NVFP4Linear) for module in model.modules())


def test_for_a_size_that_cannot_be_packed_the_layer_is_named():
    model = nn.Sequential(nn.Linear(24, 8))
    with pytest.raises(CheckpointError, match=r"^0: a weight of shape \(8, 24\)"):
        swap_linears(model, ["0"], NVFP4)


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_as_on_the_twin(dtype, checkpointing):
    tokens = torch.randint(0, 64, (2, 9))
    gradients = []
    for model in packed_model_and_twin(dtype):
        model = with_lora(model).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    ours, theirs = gradients
    assert len(ours) == 20
    assert all(tensor.dtype == dtype for tensor in ours.values())  # PEFT takes the compute dtype of the base
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("safe_merge", [False, True])
def test_peft_cannot_merge_into_the_packed_weight(safe_merge):
    model = with_lora(packed_model_and_twin()[0])
    before = copy.deepcopy(model)
    with pytest.raises(QerlError, match="qerl merge"):
        model.merge_adapter(safe_merge=safe_merge)
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        if isinstance(ours, NVFP4Linear):
            assert_same_bits(ours, theirs)
