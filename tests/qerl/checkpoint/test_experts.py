"""The layout of models with experts. The oracle of names and shapes is transformers, which writes and loads them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError
from qerl.checkpoint.experts import decoder_of, fused, matching, projections
from qerl.checkpoint.shards import TensorReader, read_json, read_tensors
from tests.helpers.checkpoint_factory import EXPERT_LAYOUTS, EXPERTS, make_checkpoint

QWEN3 = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, **EXPERTS["qwen3_moe"]}


def opened(folder):
    return decoder_of(read_json(folder / "config.json"), str(folder)), read_tensors(folder)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_names_shapes_and_places_are_those_of_transformers(tmp_path, layout):
    decoder, tensors = opened(make_checkpoint(tmp_path, layout))
    matrices = {name for name, info in tensors.items() if len(info.shape) == 2 and ".layers." in name}
    assert matrices == {f"{module}.weight" for module in (*decoder.linears(), *decoder.routers())}
    assert len(decoder.linears()) == len(set(decoder.linears())) == 2 * (4 + 3 * 4)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    in_memory = {name: tuple(each.shape) for name, each in loaded.items()}
    assert decoder.shapes_in_memory({name: info.shape for name, info in tensors.items()}) == in_memory
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
    assert names - {"model.embed_tokens", "lm_head"} == {*decoder.linears(), *decoder.routers()}


def test_a_dense_decoder_has_the_linears_that_it_always_had():
    decoder = decoder_of({"model_type": "qwen3", "num_hidden_layers": 3}, "m")
    assert (decoder.linears(), decoder.routers(), decoder.has_experts) == (projections(3), [], False)
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
        ({"model_type": "glm4_moe", "n_routed_experts": 8}, "of another kind (glm4_moe, "),
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
