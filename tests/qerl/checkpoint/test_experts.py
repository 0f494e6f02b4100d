"""The layout of models with experts. The oracle of names and shapes is transformers, which writes and loads them."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.base.errors import CheckpointError
from qerl.checkpoint.experts import DOWN, FUSED_GATE_UP, decoder_of, fused, matching
from qerl.checkpoint.load import check_config_fits
from qerl.checkpoint.shards import TensorReader, read_json, read_tensors
from qerl.config.names import PROJECTIONS
from qerl.plan.sizes import KNOWN, sizes_of
from tests.helpers.checkpoint_factory import EXPERT_LAYOUTS, EXPERTS, make_checkpoint

SEVEN = [
    f"model.layers.{layer}.{part}"
    for layer in range(3)
    for part in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
]
QWEN3 = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, **EXPERTS["qwen3_moe"]}


def opened(folder):
    return decoder_of(read_json(folder / "config.json"), str(folder)), read_tensors(folder)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_names_shapes_and_places_are_those_of_transformers(tmp_path, layout):
    decoder, tensors = opened(make_checkpoint(tmp_path, layout))
    matrices = {name for name, info in tensors.items() if len(info.shape) == 2 and ".layers." in name}
    assert matrices == {f"{module}.weight" for module in (*decoder.linears(), *decoder.kept())}
    assert len(decoder.linears()) == len(set(decoder.linears())) == 2 * (4 + 3 * 4)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    in_memory = {name: tuple(each.shape) for name, each in loaded.items()}
    for name in (FUSED_GATE_UP, DOWN):
        assert in_memory[f"model.layers.1.{name}"] == decoder.shape_in_memory(name)
    check_config_fits(tmp_path, tensors)
    router = decoder.kept()[0]
    left = {name: info for name, info in tensors.items() if name != f"{router}.weight"}
    with pytest.raises(CheckpointError, match=f"{decoder.in_memory(router)}.weight is missing"):
        check_config_fits(tmp_path, left)
    with TensorReader(tensors) as read:
        for expert in decoder.experts_of(1):
            for module in expert:
                weight, place = read(f"{module}.weight"), decoder.place_of(module)
                rows = slice(place.first_row, place.first_row + len(weight))
                assert weight.shape == decoder.shape_of(module.rpartition(".")[2])
                assert torch.equal(loaded[place.tensor][place.expert, rows], weight), module


def test_layers_with_dense_mlps_are_those_of_transformers(tmp_path):
    options = {"layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "max_shard_size": "10MB"}
    decoder, tensors = opened(make_checkpoint(tmp_path, "qwen3_moe", **options))
    assert decoder.sparse == (1, 5)
    names = {name.removesuffix(".weight") for name, info in tensors.items() if len(info.shape) == 2}
    assert names - {"model.embed_tokens", "lm_head"} == {*decoder.linears(), *decoder.kept()}


def test_a_dense_decoder_has_the_linears_that_it_always_had():
    decoder = decoder_of({"model_type": "qwen3", "num_hidden_layers": 3}, "m")
    assert (decoder.linears(), decoder.kept(), decoder.has_experts) == (SEVEN, [], False)
    assert decoder.place_of("model.layers.0.mlp.gate_proj") is None


@pytest.mark.parametrize(("kind", "first", "last"), [("qwen3_moe", "gate_proj", "up_proj"), ("mixtral", "w1", "w3")])
def test_gate_and_up_of_one_expert_are_fused_and_those_of_others_are_not(kind, first, last):
    decoder = decoder_of({**QWEN3, **EXPERTS[kind], "model_type": kind, "intermediate_size": 112}, "m")
    groups = fused(decoder.linears_of(2))
    assert len(groups) == 2 + 2 * 4  # q/k/v and o, then gate/up and down of each expert
    expert = decoder.experts_of(2)[3]
    assert (expert.gate, expert.up) in groups
    assert (expert.gate.rpartition(".")[2], expert.up.rpartition(".")[2]) == (first, last)
    assert (expert.down,) in groups


def test_patterns_name_experts():
    linears = decoder_of(QWEN3, "m").linears()
    assert len(matching(linears, ["re:.*experts.*"], "--ignore")) == 4 * 4 * 3
    assert len(matching(linears, ["re:.*\\.experts\\.2\\.down_proj"], "--ignore")) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1}, "deepseek_v3, n_shared_experts"),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96}, "qwen2_moe, shared_expert_intermediate"),
        ({"model_type": "glm4_moe", "n_routed_experts": 8}, "does not support yet (glm4_moe, "),
        ({"shared_expert_intermediate_size": 96}, "qwen3_moe, shared_expert_intermediate_size: 96"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok None"),
        ({"num_experts": 10**9}, "num_experts 1000000000"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size 0"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers 'all'"),
        ({"decoder_sparse_step": -1}, "decoder_sparse_step -1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change, words):
    with pytest.raises(CheckpointError, match=r"^m[ :]") as raised:
        decoder_of({**QWEN3, **change}, "m")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    if "model_type" in change or "shared_expert_intermediate_size" in change:
        assert "Qwen3-MoE, OLMoE, Mixtral" in str(raised.value)


def test_whether_weights_of_experts_sum_to_one():
    mixtral = {"model_type": "mixtral", "intermediate_size": 112, "norm_topk_prob": False}
    for change, normalises in (({}, True), ({"norm_topk_prob": False}, False), (mixtral, True)):
        assert decoder_of({**QWEN3, **change}, "m").normalises is normalises


NINE_B = {  # the text part of Qwen3.5-9B
    "model_type": "qwen3_5_text",
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "vocab_size": 248320},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": False},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4},
}
LARGER = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24}
TWENTY_SEVEN_B = {**NINE_B, **LARGER, "linear_num_value_heads": 48}


@pytest.mark.parametrize(("config", "mib", "block"), [(NINE_B, 49, 528), (TWENTY_SEVEN_B, 147, 784)])
def test_a_sequence_takes_its_states_and_whole_blocks_of_vllm_s_cache(config, mib, block):
    """vLLM 0.25.1 set these numbers of tokens for its blocks; a layer's states take one, in three of four layers."""

    from qerl.plan.engine_memory import kv_bytes_per_token

    sizes = sizes_of(config, "m")
    assert round(sizes.state_bytes / 2**20) == mib
    assert [sizes.cached_tokens(tokens) for tokens in (0, 1, block, block + 1)] == [n * block for n in (3, 4, 4, 5)]
    assert sizes.kv_bytes() == kv_bytes_per_token(AutoConfig.for_model(**config))
    groups = {("q_proj", "k_proj", "v_proj"): 1, ("o_proj",): 1, ("gate_proj", "up_proj"): 4, ("down_proj",): 4}
    groups |= {("in_proj_qkv", "in_proj_z"): 3, ("out_proj",): 3}  # of four layers
    shapes = {group: [sizes.projections[name] for name in group] for group in groups}
    numbers = [len(group) * (sum(rows for rows, _ in shapes[group]) + shapes[group][0][1]) for group in groups]
    each = zip(numbers, groups.values(), strict=True)
    assert sizes.engine_adapter_bytes(32) == 2 * 32 * sum(number * times * sizes.layers // 4 for number, times in each)


@pytest.mark.parametrize("config", [NINE_B, TWENTY_SEVEN_B])
def test_sizes_of_linear_attention_are_sums_over_the_tensors_of_transformers(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    sizes, decoder = sizes_of(config, "m"), decoder_of(config, "m")
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    convolutions = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv1d)}
    assert {*decoder.linears(), *decoder.kept()} == (linears | convolutions) - {"lm_head"}
    assert sizes.body == sum(model.get_submodule(name).weight.numel() for name in decoder.linears())
    rest = sum(each.numel() for each in model.parameters()) - sizes.body
    own = rest - model.model.norm.weight.numel() - (sizes.layers // 4) * 2 * 256  # of the norms of heads, and the last
    assert sizes.weights_bytes("bf16") == 2 * sizes.body + 2 * own
    for name in decoder.linears():
        assert sizes.projections[name.rpartition(".")[2]] == model.get_submodule(name).weight.shape
    assert sizes.kv_bytes() == 2 * 2 * 256 * 4 * sizes.layers // 4


GEMMA_31B, GEMMA_12B = (KNOWN[f"gemma-4-{size}"] for size in ("31b", "12b"))


@pytest.mark.parametrize(
    ("config", "kib"), [(GEMMA_31B, 880), ({**GEMMA_12B, "model_type": "gemma4_unified_text"}, 320 + 16)]
)
def test_sizes_of_gemma_4_are_sums_over_the_tensors_of_transformers(config, kib):
    """The numbers of Gemma 4 31B and 12B; keys and values of a token in KiB, those of windows among them."""
    own = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(own)
    written = own.to_dict()
    assert "per_layer_config" in written
    assert "global_head_dim" not in written
    for each in (config, json.loads(json.dumps(written, default=str))):
        sizes = sizes_of(each, "m")
        shapes = {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        shapes.pop("lm_head")
        assert {name: sizes.shape_of(name) for name in sizes.decoder.linears()} == shapes
        assert sizes.body == sum(map(math.prod, shapes.values()))
        norms = sum(p.numel() for n, p in model.named_parameters() if "layernorm" in n)
        assert (sizes.kept, sizes.head) == (norms, model.lm_head.weight.numel())
        assert sizes.kv_bytes() == kib * 2**10
        assert sizes.adapter(32, PROJECTIONS) == 32 * sum(map(sum, shapes.values()))
    assert fused(sizes.decoder.linears_of(5))[0] == (
        "model.layers.5.self_attn.q_proj",
        "model.layers.5.self_attn.k_proj",
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_types": ["full_attention"]},
        {"per_layer_config": {"5": {"head_dim": 512}}},  # of one of its ten layers
        {"per_layer_config": {str(n): {"head_dim": n} for n in range(5, 60, 6)}},
        {"per_layer_config": {str(n): {"sliding_window": 4} for n in range(5, 60, 6)}},
        {"per_layer_config": [512]},
        {"num_global_key_value_heads": 5},
        {"global_head_dim": -1},
    ],
)
def test_head_sizes_that_cannot_be_are_refused(wrong):
    with pytest.raises(CheckpointError, match=next(iter(wrong)) if "heads" not in str(wrong) else "divide"):
        sizes_of({**GEMMA_31B, **wrong}, "m")


def test_an_adapter_on_linear_attention_has_the_parameters_of_its_linears():
    sizes = sizes_of(TWENTY_SEVEN_B, "m")
    assert sizes.adapter(32, PROJECTIONS) == 32 * sum(
        sum(sizes.projections[name.rpartition(".")[2]]) for name in sizes.decoder.linears()
    )
    assert sizes.adapter(32, ("out_proj",)) == 48 * 32 * (5120 + 6144)
    assert sizes.adapter(32, ("v_proj",)) == 16 * 32 * (5120 + 1024)


def test_layers_with_linear_attention_are_read_from_layer_types_or_the_interval():
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    short = {**NINE_B, "num_hidden_layers": 3}
    assert decoder_of({**short, "layer_types": kinds}, "m").linear == (1, 2)
    assert decoder_of({**short, "full_attention_interval": 2}, "m").linear == (0, 2)
    assert fused(decoder_of(short, "m").linears_of(0))[:2] == [
        ("model.layers.0.linear_attn.in_proj_qkv", "model.layers.0.linear_attn.in_proj_z"),
        ("model.layers.0.linear_attn.out_proj",),
    ]
    for wrong in ({"layer_types": kinds[:2]}, {"full_attention_interval": 0}, {"layer_types": 3}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            decoder_of({**short, **wrong}, "m")


@pytest.mark.parametrize(
    "wrong", [{"linear_num_value_heads": 33}, {"linear_key_head_dim": 0}, {"linear_value_head_dim": None}]
)
def test_numbers_of_linear_attention_that_cannot_be_are_refused(wrong):
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        sizes_of({**NINE_B, **wrong}, "m")
