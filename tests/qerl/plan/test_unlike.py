"""A decoder that is unlike those we compute, though its linears have their names, is refused with the reason."""

import json

import pytest
from transformers import AutoConfig

from qerl.base.errors import CheckpointError
from qerl.checkpoint.experts import FAMILIES, check_decoder, shapes_of
from qerl.checkpoint.shards import TEXT_MODELS

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128,
    "num_key_value_heads": 4,
}  # fmt: skip
OTHERS = {
    "gemma2": ({"attn_logit_softcapping": 50.0}, "gemma2 has attn_logit_softcapping 50.0"),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 16},
        "qwen3_next has linear_num_key_heads 16"),
    "qwen3_5_text": ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
    "zamba": ({"layer_types": ["mamba", "full_attention"]}, "zamba has layer_types 'mamba'"),
    "gemma4_text": ({"hidden_size_per_layer_input": 256, "global_head_dim": 512},
        "gemma4_text has hidden_size_per_layer_input 256"),
    "gemma4_unified_text": ({"global_head_dim": 512, "num_kv_shared_layers": 1},
        "gemma4_unified_text has num_kv_shared_layers 1"),
    "gemma3_text": ({"final_logit_softcapping": 30.0}, "gemma3_text has final_logit_softcapping 30.0"),
    "deepseek_v3": ({"kv_lora_rank": 512}, "deepseek_v3 has kv_lora_rank 512"),
    "qwen3_5_moe_text": ({"intermediate_size": None, "num_experts": 8, "linear_num_key_heads": 16},
        "of a family that qerl does not support yet (qwen3_5_moe_text, num_experts: 8); it supports Qwen3-MoE, OLMoE,"),
}  # fmt: skip


@pytest.mark.parametrize("command", ["plan", "quantize"])
@pytest.mark.parametrize("family", OTHERS)
def test_another_decoder_is_refused_once_and_the_reason_is_named(here, command, family, tmp_path):
    keys, message = OTHERS[family]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **keys}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    code, _, stderr = here(command, "--model", tmp_path)
    assert code == 2
    assert stderr.count(message) == 1
    assert stderr.count("error:") == 1


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_the_text_part_of_a_model_for_pictures_is_looked_at(here, family, tmp_path):
    keys, message = OTHERS[family]
    whole = {"model_type": family.removesuffix("_text"), "text_config": {"model_type": family, **SIZES, **keys}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    code, _, stderr = here("plan", "--model", tmp_path)
    assert (code, message in stderr) == (2, True), stderr


@pytest.mark.parametrize(
    "keys", [{"layer_types": ["sliding_attention", "full_attention"]}, {"num_kv_shared_layers": 0}]
)
def test_what_is_like_ours_is_planned(here, keys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **SIZES, **keys}))
    code, stdout, stderr = here("plan", "--model", tmp_path, "--gpu", "24")
    assert "does not compute" not in stderr + stdout
    assert code in (0, 1)


MINIMAL = {
    **{"hidden_size": 4096, "intermediate_size": 128, "num_attention_heads": 64, "num_hidden_layers": 6},
    **{"vocab_size": 128, "max_position_embeddings": 256},
}
STATES = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"), 16)
EXPERTS = {"num_experts_per_tok": 2}
MORE = {
    "qwen3_5_text": {**STATES, "linear_value_head_dim": 16},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 64},
    "olmoe": {**EXPERTS, "num_experts": 4},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
}
OTHER_FAMILIES = ("olmo2", "olmo3", "smollm3", "exaone4", "ernie4_5", "seed_oss", "hunyuan_v1_dense")


@pytest.mark.parametrize("family", sorted({kind for kind, _ in TEXT_MODELS.values()} | {*FAMILIES, *OTHER_FAMILIES}))
def test_a_key_that_config_json_leaves_out_means_what_opening_takes_it_for(family):
    config = {"model_type": family, **MINIMAL, **MORE.get(family, {})}
    assert shapes_of(config, "m") == shapes_of(AutoConfig.for_model(**config).to_dict(), "m")


def test_a_gemma_4_that_says_nothing_of_embeddings_for_each_layer_has_some():
    with pytest.raises(CheckpointError, match=r"_per_layer_input 256 \(as it does where the key is left out\)"):
        check_decoder({"model_type": "gemma4_text", **MINIMAL}, "m")
