"""Whether an adapter on experts belongs to a base is found out from files, before weights are loaded."""

import pytest
import torch

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter import check_fit
from tests.helpers.checkpoint_factory import EXPERTS, fake_checkpoint

SIZES = {
    **{"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 112, "vocab_size": 320},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2},
}


def base(folder, **changes):
    return fake_checkpoint(folder / "base", **{**SIZES, **EXPERTS["qwen3_moe"], **changes})


def factors(shared, layers=(0, 1), experts=4, width=48, rank=4):
    """The tensors of an adapter on attention's o_proj and on experts."""
    outer, found = (() if shared else (experts,)), {}
    for layer in range(2):
        found[f"model.layers.{layer}.self_attn.o_proj.lora_A.weight"] = torch.zeros(8, 64)
        found[f"model.layers.{layer}.self_attn.o_proj.lora_B.weight"] = torch.zeros(64, 8)
    for layer in layers:
        inside = f"model.layers.{layer}.mlp.experts"
        found |= {
            f"{inside}.gate_up_proj.lora_A.weight": torch.zeros(*outer, rank, 64),
            f"{inside}.gate_up_proj.lora_B.weight": torch.zeros(experts, 2 * width, rank),
            f"{inside}.down_proj.lora_A.weight": torch.zeros(experts, rank, width),
            f"{inside}.down_proj.lora_B.weight": torch.zeros(*outer, 64, rank),
        }
    return found


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("shared", [True, False])
def test_an_adapter_on_the_experts_of_a_base_fits_it(adapter, shared):
    check_fit(adapter, factors(shared), str(base(adapter)))


def test_layers_with_dense_mlps_have_no_experts_to_adapt(adapter):
    check_fit(adapter, factors(True, layers=(1,)), str(base(adapter, mlp_only_layers=[0])))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"width": 64}, r"gate_up_proj\.lora_B\.weight is \(4, 128, 4\) and the base's gate_up_proj 4 x 96 x 64"),
        ({"experts": 8}, r"gate_up_proj\.lora_A\.weight is \(8, 4, 64\) and the base's gate_up_proj 4 x 96 x 64"),
        ({"layers": (0,)}, r"acts on experts\.gate_up_proj in 1 layers, .*\(not in both: 1\)"),
    ],
)
def test_an_adapter_of_other_experts_is_refused(adapter, given, words):
    with pytest.raises(CheckpointError, match=words):
        check_fit(adapter, factors(False, **given), str(base(adapter)))


def test_an_adapter_on_experts_does_not_fit_a_dense_model(adapter):
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj\.lora_A\.weight is .* and the base's gate_up_proj missing"
    ):
        check_fit(adapter, factors(True), str(base(adapter, num_experts=0)))
