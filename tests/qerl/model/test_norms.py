"""Block norms are found by structure; noise acts in float32 and is removed without a trace."""

import pytest
import torch
from torch import nn

from qerl.base.errors import EngineError
from qerl.checkpoint.adapter import attach_lora
from qerl.checkpoint.load import load_model
from qerl.model.norms import block_norms, set_norm_noise_
from tests.helpers.bases import FAMILIES, write_base

NORM = "model.layers.0.input_layernorm"


@pytest.mark.parametrize("family", FAMILIES)
def test_two_norms_per_layer_are_found_whatever_their_class(family, tmp_path):
    model = load_model(write_base(tmp_path / family, family), "bf16", "float32")
    expected = [
        f"model.layers.{i}.{norm}" for i in range(2) for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    assert sorted(block_norms(model)) == expected  # neither QK-norms (Qwen3) nor the final norm


@pytest.fixture
def model(base):
    return load_model(base, "bf16", "float32")


def ones(model, value):
    return {name: torch.full_like(module.weight, value) for name, module in block_norms(model).items()}


def test_noise_adds_to_the_weight(model):
    module = block_norms(model)[NORM]
    x = torch.randn(3, 64)
    clean = module(x)
    noise = torch.randn(64) * 0.1
    assert set_norm_noise_(block_norms(model), {NORM: noise}) == 1
    x_hat = x * (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    torch.testing.assert_close(module(x), clean + noise * x_hat)


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


def test_gradients_flow_through_a_noisy_norm(model):
    norms = block_norms(model)
    set_norm_noise_(norms, ones(model, 0.05))
    embeddings = model.get_input_embeddings()(torch.arange(8)[None]).requires_grad_()
    model(inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad.abs().sum() > 0


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


def test_zero_norms_raise():
    with pytest.raises(EngineError, match="no RMSNorm"):
        block_norms(nn.Linear(4, 4))


def test_a_norm_with_another_formula_raises():
    class CenteredNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x):
            return self.weight * (x - x.mean(-1, keepdim=True))

    with pytest.raises(EngineError, match="CenteredNorm"):
        block_norms(nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"norm": CenteredNorm()})])}))
