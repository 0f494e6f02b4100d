"""Mixtures of experts opened with our layers, against transformers' own model on the same weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError
from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.load import load_model
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import read_json
from qerl.engine.vllm.opening import check_experts_served
from qerl.formats import NVFP4
from qerl.model.experts import ExpertBlock
from tests.helpers.checkpoint_factory import EXPERT_LAYOUTS, make_checkpoint
from tests.helpers.layer_policies import difference
from tests.helpers.moe import make_moe, pack_moe

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


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_16_bit_and_packed_models_compute_what_transformers_does(tmp_path, layout):
    source = make_checkpoint(tmp_path / "source", layout, max_shard_size="1GB")
    folder, twin = pack_moe(source, tmp_path)
    for opened, format, weights in ((source, "bf16", source), (folder, "nvfp4", twin)):
        ours = load_model(opened, format)
        theirs = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        assert sum(isinstance(module, ExpertBlock) for module in ours.modules()) == 2
        held = ours.model.layers[1].mlp.experts.gate_up_proj
        assert held.tensor_names[0] == ("weight" if format == "bf16" else "weight_packed")
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


def test_vllm_refuses_a_family_that_its_plugin_does_not_know(tmp_path):
    decoder = decoder_of(read_json(make_checkpoint(tmp_path / "olmoe", "olmoe") / "config.json"), "m")
    with pytest.raises(CheckpointError, match=r"OLMoE, and qerl serves Qwen3-MoE with vLLM: .*engine: transformers"):
        check_experts_served(tmp_path / "olmoe", NVFP4, decoder)


def test_experts_in_8_bits_or_with_rounded_activations_are_refused(moe, packed, tmp_path):
    """Folders packed by the formats' own arithmetic, as others may publish them."""
    eight, _ = pack_moe(moe, tmp_path, "fp8_block")
    config = {"quantization_config": NVFP4.quantization_config(["lm_head"], "dynamic")}
    rounds = changed(packed[0], tmp_path / "rounds", lambda tensors: None, **config)
    for folder, what in ((eight, "FP8, and"), (rounds, "NVFP4, with rounded activations, and")):
        with pytest.raises(CheckpointError, match=f"{folder} is a mixture of experts in {what} qerl has experts in"):
            resolve_model(str(folder))
