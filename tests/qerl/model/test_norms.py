"""Block norms are found by structure; noise acts in float32 and is removed without a trace.

The paper's equivalence holds on real modules: noise in a norm is multiplicative noise on the linears that read it. With
x_hat the normalized input, w the norm's weight and z its noise (arXiv 2510.11696, section 3.3):

    W ((w + z) * x_hat) = (W diag(1 + z / w)) (w * x_hat)

so row j of W^T (input feature j) is scaled by 1 + z_j / w_j in every linear that reads the norm: with one vector for q,
k and v, and another for gate and up. Biases do not change. In a linear with an adapter, A is scaled as well.
"""

import pytest
import torch
from torch import nn

from qerl.base.errors import EngineError
from qerl.checkpoint.adapter import adapter_tensors, attach_lora
from qerl.checkpoint.load import load_model
from qerl.engine.open import open_engine
from qerl.engine.options import EngineOptions
from qerl.formats.nvfp4.linear import NVFP4Linear
from qerl.model.norms import block_norms, set_norm_noise_
from tests.helpers.bases import FAMILIES, write_base

NORM = "model.layers.0.input_layernorm"


@pytest.fixture
def model(base):
    return load_model(base, "bf16", "float32")


def ones(model, value):
    return {name: torch.full_like(module.weight, value) for name, module in block_norms(model).items()}


def test_noise_is_relative_to_the_clean_norm_and_restored_bit_exactly(model):
    tokens = torch.arange(20)[None]
    clean = model(tokens).logits
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    norms = block_norms(model)
    set_norm_noise_(norms, ones(model, 0.05))
    once = model(tokens).logits
    set_norm_noise_(norms, ones(model, 0.05))
    assert torch.equal(model(tokens).logits, once)  # noise is not cumulative
    assert not torch.equal(once, clean)
    embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad.any()
    assert set_norm_noise_(norms, None) == 0
    assert torch.equal(model(tokens).logits, clean)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_a_small_sigma_acts_where_bfloat16_storage_swallows_it():
    """Sigma 1e-4 on a bfloat16 norm changes nothing if stored in the weight; here the output moves as predicted."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    sigma = 1e-4
    torch.manual_seed(0)
    norm = Qwen2RMSNorm(4096).to(torch.bfloat16)
    layer = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"input_layernorm": norm})])})
    noise = sigma * torch.randn(4096)
    assert torch.equal(norm.weight + noise.to(torch.bfloat16), norm.weight)  # bfloat16 swallows it
    x = torch.randn(512, 4096, dtype=torch.bfloat16)
    set_norm_noise_(block_norms(layer), {"layers.0.input_layernorm": torch.zeros(4096)})
    clean = norm(x).float()
    set_norm_noise_(block_norms(layer), {"layers.0.input_layernorm": noise})
    moved = (norm(x).float() - clean) / clean.where(clean != 0, 1)
    # Outputs are rounded to bfloat16, so few of them move, by a whole step. The mean over rows recovers the noise.
    recovered = moved.mean(0)
    slope = (recovered * noise).sum() / noise.pow(2).sum()
    assert slope.item() == pytest.approx(1.0, abs=0.25)


def test_noise_acts_in_trained_norms_of_a_model_in_16_bits(base):
    """Their weights are in float32, their outputs in 16 bits."""
    policy = attach_lora(load_model(base, "bf16", "bfloat16"), rank=4, alpha=8, train_norms=True)
    tokens, norms = torch.arange(20)[None], block_norms(policy)
    assert {module.weight.dtype for module in norms.values()} == {torch.float32}
    clean = policy(tokens).logits
    assert set_norm_noise_(norms, ones(policy, 0.05)) == len(norms) == 4
    noisy = policy(tokens).logits
    assert noisy.dtype == clean.dtype == torch.bfloat16
    assert not torch.equal(noisy, clean)
    set_norm_noise_(norms, None)
    assert torch.equal(policy(tokens).logits, clean)


def test_wrong_names_and_shapes_raise(model):
    norms = block_norms(model)
    with pytest.raises(EngineError, match=r"layers\.9"):
        set_norm_noise_(norms, {"model.layers.9.input_layernorm": torch.zeros(64)})
    with pytest.raises(EngineError, match="shape"):
        set_norm_noise_(norms, {NORM: torch.zeros(63)})


def test_a_norm_with_another_formula_and_a_model_without_norms_raise():
    class CenteredNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x):
            return self.weight * (x - x.mean(-1, keepdim=True))

    with pytest.raises(EngineError, match="CenteredNorm"):
        block_norms(nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"norm": CenteredNorm()})])}))
    with pytest.raises(EngineError, match="no RMSNorm"):
        block_norms(nn.Linear(4, 4))


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
            gain = norms[name].weight.detach() + ("Gemma" in type(norms[name]).__name__)
            yield f"{layer}.{reader}", 1 + z / gain


@pytest.mark.parametrize("family", [*FAMILIES, "gemma"])
def test_a_noisy_model_is_the_model_with_scaled_weights(family, tmp_path):
    """q, k and v share one vector, and gate and up another. The tolerance is tight enough to tell them apart.

    Gemma's norm multiplies by 1 + weight.
    """
    engine, noise = open_noisy(write_base(tmp_path, family), "bf16")
    model = engine.policy_model()
    assert sorted(noise) == [f"model.layers.{layer}.{norm}" for layer in range(2) for norm in READERS]
    clean = engine.score(PROMPTS, COMPLETIONS)
    engine.set_noise(noise)
    noisy = engine.score(PROMPTS, COMPLETIONS)
    engine.set_noise(None)
    swapped = dict(zip(noise, reversed(noise.values()), strict=True))  # each norm has a vector of another kind of norm
    weights = {name: module.weight.detach().clone() for name, module in model.named_modules() if "_proj" in name}
    found = []
    for vectors in (noise, swapped):
        with torch.no_grad():
            for name, factor in scales(model, vectors):
                model.get_submodule(name).weight.copy_(weights[name] * factor)  # (out, in): column j by 1 + z_j / w_j
        found.append(engine.score(PROMPTS, COMPLETIONS))
    for row, expected, wrong, before in zip(noisy, *found, clean, strict=True):
        assert row == pytest.approx(expected, abs=2e-4)
        for other in (wrong, before):
            assert max(abs(a - b) for a, b in zip(row, other, strict=True)) > 4e-3  # 20 times the tolerance


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
