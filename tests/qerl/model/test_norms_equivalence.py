"""The paper's equivalence on real modules: noise in a norm is multiplicative noise on the linears that read it.

With x_hat the normalized input, w the norm's weight and z its noise (arXiv 2510.11696, section 3.3):

    W ((w + z) * x_hat) = (W diag(1 + z / w)) (w * x_hat)

so row j of W^T (input feature j) is scaled by 1 + z_j / w_j in every linear that reads the norm: with one vector for q,
k and v, and another for gate and up. Biases do not change. In a linear with an adapter, A is scaled as well.
"""

import pytest
import torch

from qerl.checkpoint.adapter import adapter_tensors, attach_lora
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.formats.nvfp4.linear import NVFP4Linear
from qerl.model.norms import block_norms
from tests.helpers.bases import FAMILIES, write_base

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]
COMPLETIONS = [[20, 21, 22, 23], [24, 25]]


def open_noisy(base, format):
    """An engine whose norms are not all 1, and noise of sigma 0.1."""
    engine = open_engine(str(base), format, EngineOptions(engine="transformers", dtype="float32"))
    torch.manual_seed(4)
    norms = block_norms(engine.policy_model())
    with torch.no_grad():
        for norm in norms.values():
            norm.weight.uniform_(0.5, 2.0)
    return engine, {name: 0.1 * torch.randn(norm.weight.numel()) for name, norm in norms.items()}


def scales(model, noise):
    """The factors 1 + z / w of the input features of each linear, by the linear's name."""
    norms = block_norms(model)
    for name, z in noise.items():
        layer, _, norm = name.rpartition(".")
        for reader in READERS[norm]:
            yield f"{layer}.{reader}", 1 + z / norms[name].weight.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_noisy_model_is_the_model_with_scaled_weights(family, tmp_path):
    engine, noise = open_noisy(write_base(tmp_path, family), "bf16")
    clean = engine.score(PROMPTS, COMPLETIONS)
    engine.set_noise(noise)
    noisy = engine.score(PROMPTS, COMPLETIONS)
    engine.set_noise(None)
    model = engine.policy_model()
    with torch.no_grad():
        for name, factor in scales(model, noise):
            model.get_submodule(name).weight.mul_(factor)  # (out, in): column j by 1 + z_j / w_j
    scaled = engine.score(PROMPTS, COMPLETIONS)
    for row, expected, before in zip(noisy, scaled, clean, strict=True):
        assert row == pytest.approx(expected, abs=2e-4)
        assert max(abs(a - b) for a, b in zip(row, before, strict=True)) > 0.02  # 100 times the tolerance


def inputs_and_outputs(engine, names):
    """Inputs and outputs of each linear in one pass over the prompts."""
    model, seen = engine.policy_model(), {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: (inputs[0].clone(), output.clone())})
        )
        for name in names
    ]
    engine.score(PROMPTS, COMPLETIONS)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_q_k_v_share_one_vector_and_gate_up_another(family, tmp_path):
    """Seen at the inputs of the linears in layer 0, whose norm has the same input with and without noise."""
    engine, noise = open_noisy(write_base(tmp_path, family), "bf16")
    layer = "model.layers.0"
    names = [f"{layer}.{reader}" for readers in READERS.values() for reader in readers]
    clean = inputs_and_outputs(engine, names)
    only_attention = {name: z for name, z in noise.items() if name == f"{layer}.input_layernorm"}
    only_mlp = {name: z for name, z in noise.items() if name == f"{layer}.post_attention_layernorm"}
    norms = block_norms(engine.policy_model())
    for part in (only_attention, only_mlp):
        ((norm, z),) = part.items()
        engine.set_noise(part)
        noisy = inputs_and_outputs(engine, names)
        engine.set_noise(None)
        for reader in READERS[norm.rpartition(".")[2]]:
            name = f"{layer}.{reader}"
            scaled = clean[name][0] * (1 + z / norms[norm].weight.detach())
            torch.testing.assert_close(noisy[name][0], scaled, rtol=1e-5, atol=1e-6)
            assert (scaled - clean[name][0]).abs().max() > 1e-2
        if norm.endswith("post_attention_layernorm"):  # noise of a norm acts only on its own readers
            for reader in READERS["input_layernorm"]:
                assert torch.equal(noisy[f"{layer}.{reader}"][0], clean[f"{layer}.{reader}"][0])


def test_the_vector_of_the_other_norm_does_not_explain_the_noise(tmp_path):
    """The tolerance above is tight enough: scaling gate and up by the vector of q, k and v fails."""
    engine, noise = open_noisy(write_base(tmp_path), "bf16")
    engine.set_noise(noise)
    noisy = engine.score(PROMPTS, COMPLETIONS)
    engine.set_noise(None)
    swap = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}
    swapped = {f"{name.rpartition('.')[0]}.{swap[name.rpartition('.')[2]]}": z for name, z in noise.items()}
    model = engine.policy_model()
    with torch.no_grad():
        for name, factor in scales(model, swapped):
            model.get_submodule(name).weight.mul_(factor)
    assert noisy[0] != pytest.approx(engine.score(PROMPTS, COMPLETIONS)[0], abs=2e-3)


def test_an_nvfp4_linear_and_its_adapter_are_scaled_together(nvfp4_base):
    """For packed linears with LoRA, the noisy output is that of the scaled dequantized weight and the scaled A."""
    engine, noise = open_noisy(nvfp4_base, "nvfp4")
    policy = attach_lora(engine.policy_model(), rank=4, alpha=8)
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.copy_(0.2 * torch.randn_like(tensor))
    model = engine.policy_model()
    factors = dict(scales(model, noise))
    names = [name for name in factors if name.startswith("model.layers.0.self_attn")]
    clean = inputs_and_outputs(engine, names)
    engine.set_noise(noise)
    noisy = inputs_and_outputs(engine, names)
    assert len(names) == 3
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear.base_layer, NVFP4Linear)
        x, factor = clean[name][0], factors[name]
        a, b = (getattr(linear, f"lora_{matrix}")["default"].weight for matrix in "AB")
        packed = linear.base_layer.dense(torch.float32) * factor
        expected = x @ packed.T + 2.0 * (x @ (a * factor).T) @ b.T  # alpha / rank = 2
        torch.testing.assert_close(noisy[name][1], expected, rtol=1e-4, atol=1e-4)
        assert (noisy[name][1] - clean[name][1]).abs().max() > 0.05
