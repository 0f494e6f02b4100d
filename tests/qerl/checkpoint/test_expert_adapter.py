"""Adapters on experts: what PEFT loads from our files computes what we do, and the other way round."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter import (
    adapter_tensors,
    attach_lora,
    attach_saved_,
    check_fit,
    keep_expert_reference_,
    read_fitting_adapter,
    reference_adapter,
    save_adapter,
)
from qerl.checkpoint.adapter_file import attach_to_experts_, linear_targets, read_adapter
from qerl.checkpoint.load import load_model
from tests.helpers.checkpoint_factory import EXPERTS, fake_checkpoint, make_checkpoint
from tests.helpers.layer_policies import difference
from tests.helpers.moe import make_moe

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_seed")
TOKENS = torch.randint(300, (2, 13), generator=torch.Generator().manual_seed(0))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATE_UP_A = "model.layers.0.mlp.experts.gate_up_proj.lora_A.weight"
DOWN_B = "model.layers.0.mlp.experts.down_proj.lora_B.weight"


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make_moe(tmp_path_factory.mktemp("moe") / "moe")


def policy(moe, kind, rank=4, expert_rank=4):
    model = attach_lora(load_model(moe, "bf16"), rank, 2 * rank, ATTENTION)
    attach_to_experts_(model, kind, expert_rank, 2.0)
    randomized(adapter_tensors(model).values())
    return model


def randomized(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.2 * torch.randn_like(parameter))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    ("layout", "kind", "expert_rank"),
    [("qwen3_moe", "shared", 4), ("qwen3_moe", "per_expert", 1), ("olmoe", "per_expert", 4), ("mixtral", "shared", 4)],
)
def test_peft_computes_the_same_with_our_folder(moe, tmp_path, layout, kind, expert_rank):
    folder = moe if layout == "qwen3_moe" else make_checkpoint(tmp_path / layout, layout, max_shard_size="1GB")
    ours = policy(folder, kind, expert_rank=expert_rank)
    save_adapter(ours, tmp_path / "adapter", str(folder))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = logits(base)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert difference(logits(ours), logits(theirs)) < 1e-5
    assert difference(before, logits(theirs)) > 0.01

    own, (tensors, scaling) = adapter_tensors(ours), read_adapter(tmp_path / "adapter")
    assert scaling == 2.0
    assert own.keys() == tensors.keys()
    assert all(torch.equal(own[name], tensors[name]) for name in own)
    assert tensors[GATE_UP_A].dim() == tensors[DOWN_B].dim() == (2 if kind == "shared" else 3)
    again = attach_saved_(load_model(folder, "bf16"), tensors, scaling)
    assert torch.equal(logits(ours), logits(again))


def test_an_adapter_that_peft_made_is_read(moe, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=list(ATTENTION), target_parameters=parameters)
    theirs = get_peft_model(base, config)
    randomized(parameter for parameter in theirs.parameters() if parameter.requires_grad)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = attach_saved_(load_model(moe, "bf16"), *read_fitting_adapter(tmp_path / "adapter", str(moe)))
    assert difference(logits(ours), logits(theirs)) < 1e-5


def test_a_fresh_adapter_changes_nothing_and_its_a_is_drawn_as_peft_draws_it(moe):
    model = attach_lora(load_model(moe, "bf16"), 4, 8, ATTENTION)
    before = logits(model)
    attach_to_experts_(model, "per_expert", 2, 2.0)
    assert torch.equal(before, logits(model))
    tensors = adapter_tensors(model)
    assert tensors[GATE_UP_A].shape == (4, 2, 64)
    assert 0.9 * 64**-0.5 < tensors[GATE_UP_A].abs().max() <= 64**-0.5
    assert not tensors[DOWN_B].any()


def test_the_reference_is_the_adapter_as_it_was_or_none(moe):
    model = policy(moe, "shared")
    with reference_adapter(model):
        base = logits(model)
    assert torch.equal(base, logits(load_model(moe, "bf16")))

    model.add_adapter("ref", model.peft_config["default"])  # as TRL does with a KL term
    for name, parameter in list(model.named_parameters()):
        if ".default." in name:
            model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
    keep_expert_reference_(model)
    began = logits(model)
    randomized(adapter_tensors(model).values())
    with reference_adapter(model):
        assert torch.equal(logits(model), began)
    assert difference(logits(model), began) > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 3, "lora_alpha": 6}, r"\(16, 64\), which is not the rank 3 of adapter_config.json"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "qerl reads plain LoRA of one rank, and on experts that of"),
        ({"rank_pattern": {"mlp.experts.down_proj": 2}}, "qerl reads plain LoRA of one rank"),
        ({"alpha_pattern": {"q_proj": 2}}, "qerl reads plain LoRA of one rank"),
        ({"target_parameters": None, "rank_pattern": {"q_proj": 2}}, "qerl reads plain LoRA of one rank"),
    ],
)
def test_adapters_that_differ_from_place_to_place_are_refused(moe, tmp_path, changes, message):
    save_adapter(policy(moe, "per_expert"), tmp_path / "adapter", str(moe))
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path / "adapter")


def test_the_file_has_a_copy_of_a_shared_factor_for_each_expert(moe, tmp_path):
    ours = policy(moe, "shared")
    save_adapter(ours, tmp_path / "adapter", str(moe))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a = saved["base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"]
    b = saved["base_model.model.model.layers.0.mlp.experts.lora_B.weight"]
    own = adapter_tensors(ours)
    assert torch.equal(a, own[GATE_UP_A].repeat(4, 1))
    assert torch.equal(b, own[DOWN_B].repeat_interleave(4, 1))


def test_linears_of_experts_are_no_linears_of_the_model(moe, tmp_path):
    every = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
    assert linear_targets(load_model(moe, "bf16"), every) == ATTENTION
    mixed = load_model(make_moe(tmp_path / "mixed", mlp_only_layers=[0]), "bf16")
    assert linear_targets(mixed, every) == every


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
    check_fit(adapter, factors(shared, layers=(1,)), str(base(adapter, mlp_only_layers=[0])))  # 0 is a dense MLP


OTHER_LAYERS = r"acts on experts\.gate_up_proj in {} layers, and .* has it in {} \(not in both: {}\)"


@pytest.mark.parametrize(
    ("given", "of_base", "words"),
    [
        (
            {"width": 64},
            {},
            r"gate_up_proj\.lora_B\.weight is \(4, 128, 4\) and the base's gate_up_proj 4 x 96 x 64",
        ),
        (
            {"experts": 8},
            {},
            r"gate_up_proj\.lora_A\.weight is \(8, 4, 64\) and the base's gate_up_proj 4 x 96 x 64",
        ),
        ({}, {"num_experts": 0}, r"gate_up_proj\.lora_A\.weight is .* and the base's gate_up_proj missing"),
        ({"layers": (0,)}, {}, OTHER_LAYERS.format(1, 2, 1)),
        ({}, {"mlp_only_layers": [0]}, OTHER_LAYERS.format(2, 1, 0)),
    ],
)
def test_an_adapter_of_other_experts_is_refused(adapter, given, of_base, words):
    with pytest.raises(CheckpointError, match=words):
        check_fit(adapter, factors(False, **given), str(base(adapter, **of_base)))
