"""Mixtures of experts opened with our layers, against transformers' own model on the same weights."""

import json
import shutil

import pytest
import torch
from layer_policies import difference
from moe import make_moe, pack_moe
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.checkpoint.load import load_model
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import read_json
from qerl.errors import CheckpointError
from qerl.formats import NVFP4
from qerl.layers.experts import ExpertBlock

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.randint(300, (2, 13), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make_moe(tmp_path_factory.mktemp("moe") / "moe")


@pytest.fixture(scope="module")
def packed(moe, tmp_path_factory):
    return pack_moe(moe, tmp_path_factory.mktemp("packed"))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_a_16_bit_model_computes_what_transformers_does(moe):
    ours, theirs = load_model(moe, "bf16"), AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32)
    assert sum(isinstance(module, ExpertBlock) for module in ours.modules()) == 2
    assert difference(logits(ours), logits(theirs)) < 1e-5


def test_a_packed_model_computes_what_transformers_does_on_the_decoded_weights(packed):
    folder, twin = packed
    ours, theirs = load_model(folder, "nvfp4"), AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    assert ours.model.layers[1].mlp.experts.gate_up_proj.weight_packed.dtype == torch.uint8
    assert difference(logits(ours), logits(theirs)) < 1e-5


def test_a_layer_may_have_a_dense_mlp(tmp_path):
    folder = make_moe(tmp_path / "moe", mlp_only_layers=[0])
    ours, theirs = load_model(folder, "bf16"), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert [isinstance(layer.mlp, ExpertBlock) for layer in ours.model.layers] == [False, True]
    assert ours.model.layers[1].mlp.place == 0
    assert difference(logits(ours), logits(theirs)) < 1e-5


def changed(folder, place, change, **config):
    """A copy of a checkpoint with other tensors, or with another config.json."""
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(read_json(place / "config.json") | config))
    return place


EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def cut(tensors):
    tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"][:, :1].contiguous()


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda tensors: tensors.pop(f"{EXPERT}.weight"), {}, f"lacks experts .*{EXPERT}.weight; 1 tensors in all"),
        (lambda tensors: None, {"num_experts": 5}, "lacks experts .*; 6 tensors in all"),
        (lambda tensors: None, {"num_experts": 3}, "6 tensors in all"),
        (cut, {}, r"expert 2 has weight as torch.bfloat16 \[64, 1\], and config.json says torch.float32 \[64, 48\]"),
    ],
)
def test_experts_that_do_not_fit_the_config_are_refused(moe, tmp_path, change, config, message):
    folder = changed(moe, tmp_path / "changed", change, **config)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, "bf16")


def test_experts_of_another_family_are_refused(tmp_path):
    from checkpoint_factory import make_checkpoint

    folder = make_checkpoint(tmp_path / "olmoe", "olmoe")
    with pytest.raises(CheckpointError, match="family OLMoE, and qerl opens Qwen3-MoE"):
        load_model(folder, "bf16")


def test_experts_in_8_bits_or_with_rounded_activations_are_refused(moe, packed, tmp_path):
    """Folders packed by the formats' own arithmetic, as others may publish them."""
    eight, _ = pack_moe(moe, tmp_path, "fp8_block")
    config = {"quantization_config": NVFP4.quantization_config(["lm_head"], "dynamic")}
    rounds = changed(packed[0], tmp_path / "rounds", lambda tensors: None, **config)
    for folder, what in ((eight, "FP8, and"), (rounds, "NVFP4, with rounded activations, and")):
        with pytest.raises(CheckpointError, match=f"{folder} is a mixture of experts in {what} qerl has experts in"):
            resolve_model(str(folder))
