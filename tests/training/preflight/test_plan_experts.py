"""A mixture of experts in the plan: Qwen3-30B-A3B's sizes by hand, its decode limits, and keys that do not fit."""

from contextlib import nullcontext

import pytest

from qerl.base.errors import ConfigError
from qerl.checkpoint.adapter import attach_lora
from qerl.checkpoint.adapter_file import attach_to_experts_
from qerl.checkpoint.load import load_model
from qerl.cli.plan import expert_sentences
from qerl.config.recipe import load_recipe
from qerl.plan.engine_memory import card_of
from qerl.plan.sizes import KNOWN, read_sizes, sizes_of
from tests.helpers.moe import make_moe
from training.policy.train_memory import measure_layer, model_shapes
from training.preflight.advice import advice
from training.preflight.plan import CHOSEN, DECODED, check_layers, plan, trainee_of

A3B = "Qwen/Qwen3-30B-A3B"
GIB = 2**30
WORKLOAD_A = (
    *("rollout.prompts_per_step=16", "rollout.group_size=8", "rollout.max_new_tokens=512"),
    *("data.max_prompt_tokens=128", "adapter.rank=16"),
)
# 48 layers: experts of 2048 x 768, attention with 32 and 4 heads of 128
EXPERTS = 48 * 128 * 3 * 2048 * 768
ATTENTION = 48 * 2048 * 128 * (2 * 32 + 2 * 4)
HEAD = 151936 * 2048


@pytest.fixture(scope="module")
def wide_moe(tmp_path_factory):
    """A model in which what a token keeps is mostly that of its experts: 8 of 32."""
    experts = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 96}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    return make_moe(tmp_path_factory.mktemp("wide") / "moe", hidden_size=256, **experts, **heads)


def config_with(*values, base=A3B):
    return load_recipe("dapo_7b", [*WORKLOAD_A, *values], base=base)


def test_the_sizes_of_30b_a3b_computed_by_hand():
    sizes = read_sizes(A3B)
    assert (sizes.of_experts, sizes.outside_experts) == (EXPERTS, ATTENTION)
    assert sizes.active == ATTENTION + EXPERTS // 16
    assert sizes.routers == 48 * 128 * 2048
    outer = 2 * HEAD + 48 * 2 * 2048 + 48 * 128 * 2048
    assert sizes.weights_bytes("nvfp4") == (ATTENTION + EXPERTS) * 9 / 16 + 2 * outer
    assert sizes.weights_bytes("nvfp4") / GIB == pytest.approx(16.84, abs=0.03)
    assert sizes.weights_bytes("bf16") / GIB == pytest.approx(56.9, abs=0.1)
    assert sizes.kv_bytes() == 96 * 2**10
    assert sizes.decoded == 2 * 128 * 2 * 2048 * 768  # gate and up; down comes after them
    assert sizes.inner == 8 * 768


@pytest.mark.parametrize(
    ("values", "rank", "experts"),
    [
        ((), 16, 2048 + 128 * 2 * 768 + 128 * 768 + 2048),  # A of gate/up and B of down are there once
        (("adapter.expert_rank=4",), 4, 2048 + 128 * 2 * 768 + 128 * 768 + 2048),
        (("adapter.experts=per_expert",), 2, 128 * (2048 + 2 * 768 + 768 + 2048)),  # an eighth of the rank
        (("adapter.experts=per_expert", "adapter.expert_rank=16"), 16, 128 * (2048 + 2 * 768 + 768 + 2048)),
        (("adapter.experts=none",), 0, 0),
        (("adapter.targets=[q_proj, k_proj, v_proj, o_proj]",), 0, 0),
    ],
)
def test_parameters_of_the_adapter_by_hand(values, rank, experts):
    attention = 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    config, sizes = config_with(*values), read_sizes(A3B)
    assert trainee_of(config).trained(sizes).count == attention + 48 * rank * experts
    words = f"adapters of rank {rank} on experts" if rank else "which get no adapter"
    assert words in expert_sentences(config, plan(config, sizes, card_of("h200")))[0]


def test_layers_with_dense_mlps_count_as_such():
    sizes = sizes_of({**KNOWN["qwen3-30b-a3b"], "mlp_only_layers": [0, 5]}, "m")
    dense = 3 * 2048 * 6144
    assert sizes.body == ATTENTION + EXPERTS * 46 // 48 + 2 * dense
    assert sizes.adapter(1, ("up_proj",)) == 2 * (2048 + 6144)


@pytest.mark.parametrize(("sequences", "limit"), [(1, 2000), (32, 9000), (256, 63000)])
def test_decoding_reads_the_experts_that_are_chosen(sequences, limit):
    """The limits at 4.3 TB/s are sequences over the bytes of the experts that so many tokens choose between them."""
    read = read_sizes(A3B).read_bytes("nvfp4", sequences) - 2 * HEAD  # embeddings are not read as a whole
    assert sequences / (read / 4.3e12) == pytest.approx(limit, rel=0.25)


def test_a_step_fits_on_80_gb_and_not_on_24():
    config, sizes = config_with(), read_sizes(A3B)
    made = plan(config, sizes, card_of("h100"))
    assert not made.problems
    assert made.memory["training"][DECODED] == sizes.decoded
    assert 1.5 < made.seconds["training"] < 4
    assert plan(config, sizes, card_of("24")).problems
    assert "--model Qwen/Qwen3-14B" in advice(config, sizes, card_of("24"))


@pytest.mark.parametrize(("gpu", "new_tokens", "more"), [("h200", 512, 384 * 168060), ("40", 4096, 0)])
def test_what_routers_chose_is_planned_for_each_token_of_the_cache(gpu, new_tokens, more):
    """A byte for each of 8 experts in 48 layers, in both phases. A cache that takes all that is left makes room."""
    sizes, card, long = read_sizes(A3B), card_of(gpu), f"rollout.max_new_tokens={new_tokens}"
    made, without = (plan(config_with(long, f"rollout.router_replay={on}"), sizes, card) for on in ("true", "false"))
    for phase in ("rollout", "training"):
        assert made.memory[phase][CHOSEN] == 384 * made.cache_tokens
        assert CHOSEN not in without.memory[phase]
    assert made.peak("rollout") - without.peak("rollout") == pytest.approx(more, abs=0.01 * GIB)
    dense = plan(config_with(base="Qwen/Qwen3-8B"), read_sizes("Qwen/Qwen3-8B"), card)
    assert CHOSEN not in dense.memory["rollout"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["none", "shared", "per_expert"])
def test_the_footprint_of_a_layer_with_experts_is_what_autograd_keeps(wide_moe, kind):
    model = attach_lora(load_model(wide_moe, "bf16", dtype="bfloat16"), 8, 16, ("q_proj", "k_proj", "v_proj", "o_proj"))
    if kind != "none":
        attach_to_experts_(model, kind, 8, 2.0)
    shapes = model_shapes(model.get_base_model().config, 8, 0)
    beside = 2 * shapes.query + 2 * shapes.hidden // shapes.layers  # of attention's twin, and of the last norm
    assert shapes.footprint().layer + beside == pytest.approx(measure_layer(model.get_base_model()), rel=0.04)


# --- keys that do not fit


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("adapter.dropout=0.1",), "adapter.dropout 0.1 .*write adapter.dropout: 0.0, or adapter.experts: none"),
        (("adapter.targets=[q_proj, down_proj]",), r"targets \[q_proj, down_proj\].* all of gate_proj, up_proj"),
        (("adapter.expert_rank=1000",), "expert_rank 1000 .* more than .* write adapter.expert_rank: 768 or"),
        (("adapter.targets=[gate_proj, up_proj, down_proj]",), "one on attention.*write q_proj, k_proj, v_proj"),
        (("model.format=fp8_block",), "format fp8_block .*a mixture of experts, .*write model.format: nvfp4 or bf16"),
        (("train.fp8_recipe=blockwise",), "train.fp8_recipe blockwise .* in 16 bits; write train.fp8_recipe: null"),
        (("qat.mode=weights",), "qat given with model.base Qwen/Qwen3-30B-A3B: it is a mixture .*; write qat: null"),
        (("adapter.experts=per_expert", "adapter.targets=[q_proj]"), "experts, which consist of .*, get no adapter"),
        (("adapter.experts=none", "adapter.expert_rank=4"), "expert_rank 4 with adapter.experts none: experts, which"),
    ],
)
def test_what_experts_cannot_have_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        plan(config_with(*values), read_sizes(A3B), card_of("h200"))


@pytest.mark.parametrize(("experts", "replays", "fits"), [(255, True, True), (256, True, False), (256, False, True)])
def test_replay_is_refused_for_more_experts_than_a_byte_can_name(experts, replays, fits):
    """255 says that a choice was not recorded, so that the last expert is 254."""
    sizes = sizes_of({**KNOWN[A3B.split("/")[1].lower()], "num_experts": experts}, "m")
    config = config_with(f"rollout.router_replay={str(replays).lower()}")
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"write rollout\.router_replay: false"):
        check_layers(config, sizes.decoder)


@pytest.mark.parametrize("given", ["adapter.experts none", "adapter.expert_rank 4", "rollout.router_replay false"])
def test_keys_of_experts_are_refused_for_a_dense_model(given):
    key, value = given.split()
    config = config_with(f"{key}={value}", base="Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match=f"{given} with model.base Qwen/Qwen3-8B: it has no experts; write {key}: "):
        plan(config, read_sizes("Qwen/Qwen3-8B"), card_of("h200"))
