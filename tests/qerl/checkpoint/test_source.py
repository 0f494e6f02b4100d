"""The source of a quantization: all that cannot be quantized is refused from headers, each with a line of its own."""

import json

import pytest

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.experts import matching
from qerl.checkpoint.folder import TINY_FOLDER
from qerl.checkpoint.source import read_source
from tests.helpers.checkpoint_factory import PROJECTIONS, fake_checkpoint, layout_tensors, make_checkpoint


@pytest.fixture
def folder(tmp_path):
    return fake_checkpoint(tmp_path / "model")


def test_all_seven_projections_of_every_layer_are_quantized(folder):
    """Fused sets are those that engines fuse; the sizes are counted by hand."""
    source = read_source(str(folder))
    assert source.quantized == tuple(f"model.layers.{n}.{part}" for n in range(2) for part in PROJECTIONS)
    assert (source.name, source.kept) == (str(folder), ())
    attention, sets = "model.layers.1.self_attn", source.fused_sets()
    assert len(sets) == 2 * 4
    assert {tuple(f"{attention}.{part}_proj" for part in "qkv"), ("model.layers.1.mlp.down_proj",)} < set(sets)
    assert ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj") in sets
    weights = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 112 * 64)  # elements of the linears of two layers
    others = 2 * 320 * 64 + 64 + 2 * 2 * 64
    assert source.size_bytes() == 2 * (weights + others)
    assert source.output_bytes() == weights // 2 + weights // 16 + 14 * 4 + 2 * others


def test_groups_hold_every_tensor_once_in_the_models_order(tmp_path):
    tensors = layout_tensors(layers=12)
    folder = fake_checkpoint(tmp_path / "m", tensors, num_hidden_layers=12)
    groups = read_source(str(folder)).groups()
    assert sorted(name for group in groups for name in group) == sorted(tensors)
    assert groups[0] == ["model.embed_tokens.weight"]
    assert all(name.startswith("model.layers.10.") for name in groups[11])  # 10 after 9, not after 1
    assert groups[-1] == ["lm_head.weight", "model.norm.weight"]


def test_the_embedded_model_can_be_quantized():
    source = read_source("tiny")
    assert (source.name, source.folder) == ("tiny", TINY_FOLDER)
    assert "lm_head.weight" not in source.tensors  # tied
    assert any(name.endswith("q_norm.weight") for name in source.tensors)


@pytest.mark.parametrize("layout", ["qwen2", "qwen3", "llama", "mistral"])
def test_layouts_of_real_models_are_accepted(tmp_path, layout):
    source = read_source(str(make_checkpoint(tmp_path, layout)))
    assert len(source.quantized) == 14
    assert any(name.endswith("q_proj.bias") for name in source.tensors) == (layout == "qwen2")


def test_inverse_frequencies_of_old_checkpoints_are_left_out(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (8,))}
    source = read_source(str(fake_checkpoint(tmp_path / "m", layout_tensors() | extra)))
    assert not any("inv_freq" in name for group in source.groups() for name in group)


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        ([], []),
        (["lm_head"], []),
        (["re:.*self_attn.*"], ["0.q", "0.k", "0.v", "0.o", "1.q", "1.k", "1.v", "1.o"]),
        (["re:.*o_proj$"], ["0.o", "1.o"]),
        (["re:model.layers.1.mlp"], ["1.gate", "1.up", "1.down"]),  # matches from the start, not up to the end
        (["model.layers.0.mlp.down_proj"], ["0.down"]),
        (["re:.*[qkv]_proj", "model.layers.1.self_attn.o_proj"], ["0.q", "0.k", "0.v", "1.q", "1.k", "1.v", "1.o"]),
    ],
)
def test_ignore_patterns(folder, patterns, kept):
    source = read_source(str(folder), patterns)
    short = [f"{name.split('.')[2]}.{name.rpartition('.')[2].removesuffix('_proj')}" for name in source.kept]
    assert short == kept
    assert len(source.quantized) + len(source.kept) == 14


def test_ignore_patterns_match_as_in_compressed_tensors(folder):
    from compressed_tensors.utils.match import match_name

    linears = read_source(str(folder)).quantized
    for pattern in ["re:.*mlp", "re:mlp", "re:.*q_proj$", "re:.*q_pro$", "mlp", linears[3], "re:.*0"]:
        expected = [name for name in linears if match_name(name, pattern)]
        if expected:
            assert matching(linears, [pattern], "--ignore") == expected
        else:
            with pytest.raises(ConfigError, match="matches no layer"):
                matching(linears, [pattern], "--ignore")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["self_attn"], r"'self_attn' matches no layer.*a regex from the start"),
        (["re:self_attn"], "matches no layer"),
        (["re:.*self_attn.*", "re:.*vision.*"], r"'re:\.\*vision\.\*' matches no layer"),
        (["re:.*(self_attn"], "is not a regular expression"),
        (["re:.*"], "leaves no layer to quantize"),
        (["re:.*q_proj"], r"keeps model\.layers\.0\.self_attn\.q_proj in 16 bits but not .*k_proj and .*v_proj"),
        (["model.layers.1.mlp.up_proj"], "ignore all of them or none"),
    ],
)
def test_wrong_ignore_patterns_are_refused(folder, patterns, message):
    with pytest.raises(ConfigError, match=message):
        read_source(str(folder), patterns)


def change(drop=(), **add):
    tensors = {name: spec for name, spec in layout_tensors().items() if name not in drop}
    return tensors | {name.replace("__", "."): spec for name, spec in add.items()}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (None, {"num_experts": 8}, r"does not support yet \(llama, num_experts: 8\); it supports Qwen3-MoE"),
        (None, {"num_local_experts": 8, "model_type": "mixtral"}, "has num_experts_per_tok None, which cannot be"),
        (None, {"text_config": {}, "model_type": "qwen2_5_vl"}, r"pictures and text \(qwen2_5_vl\)"),
        (None, {"num_hidden_layers": None, "model_type": "gpt2"}, "has no num_hidden_layers"),
        (
            {"model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", (8, 16))},
            {},
            r"has model\.layers\.0\.mlp\.experts\.0\.up_proj\.weight of shape \[8, 16\]",
        ),
        (
            {"model.layers.0.self_attn.qkv_proj.weight": ("BF16", (128, 64))},
            {"model_type": "phi3"},
            r"\(phi3\) has model\.layers\.0\.self_attn\.qkv_proj\.weight.*Qwen2, Qwen2\.5, Qwen3, Llama 3",
        ),
        (change(visual__merger__weight=("BF16", (8, 8))), {}, r"has visual\.merger\.weight"),
        (change(drop=["model.layers.1.self_attn.k_proj.weight"]), {}, r"lacks 1 .*layers\.1\.self_attn\.k_proj"),
        (layout_tensors(layers=1), {}, "lacks 7 of the tensors"),
        (layout_tensors(layers=3), {}, r"has model\.layers\.2\.self_attn\.q_proj\.weight"),
        (layout_tensors(tied=True), {}, r"lacks 1 .*lm_head\.weight"),
        (change(drop=["model.embed_tokens.weight"]), {}, r"lacks 1 .*model\.embed_tokens\.weight"),
    ],
)
def test_layouts_that_are_not_supported_are_refused(tmp_path, tensors, config, message):
    folder = fake_checkpoint(tmp_path / "m", tensors, **config)
    with pytest.raises(CheckpointError, match=message):
        read_source(str(folder))


def test_in_features_have_to_be_whole_blocks_unless_the_linear_is_ignored(tmp_path):
    tensors = layout_tensors()
    for n in range(2):
        for part, shape in [("gate", (120, 64)), ("up", (120, 64)), ("down", (64, 120))]:
            tensors[f"model.layers.{n}.mlp.{part}_proj.weight"] = ("BF16", shape)
    folder = fake_checkpoint(tmp_path / "m", tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj: .*\(64, 120\).*multiple of 16"):
        read_source(str(folder))
    assert len(read_source(str(folder), ["re:.*down_proj"]).quantized) == 12


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "I16", "F64"])
def test_weights_that_are_not_16_bit_floats_are_refused(tmp_path, dtype):
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        tensors = layout_tensors()
        tensors[name] = (dtype, tensors[name][1])
        with pytest.raises(CheckpointError, match=rf"{name} is {dtype}, which is no 16-bit"):
            read_source(str(fake_checkpoint(tmp_path / "m", tensors)))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.embed_tokens.weight", (20480,), "has {} of shape"),
        ("lm_head.weight", (2, 3, 4), "has {} of shape"),
        ("model.norm.weight", (), "has {} of shape"),
        ("model.layers.0.mlp.up_proj.weight", (112,), r"has shape \[112\], a linear has two axes"),
    ],
)
def test_axes_are_checked(tmp_path, name, shape, said):
    tensors = layout_tensors() | {name: ("BF16", shape)}
    with pytest.raises(CheckpointError, match=said.format(name)):
        read_source(str(fake_checkpoint(tmp_path / "m", tensors)))


def test_a_missing_tokenizer_is_refused(tmp_path):
    folder = fake_checkpoint(tmp_path / "m", tokenizer=False)
    with pytest.raises(CheckpointError, match=r"has no tokenizer .*copy the tokenizer files"):
        read_source(str(folder))
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        read_source(str(folder))  # merges.txt is the other half
    (folder / "merges.txt").write_text("")
    assert read_source(str(folder)).quantized


def test_a_quantized_model_and_an_adapter_are_refused(tmp_path):
    quantization = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}
    nvfp4 = fake_checkpoint(tmp_path / "done", quantization_config=quantization)
    with pytest.raises(ConfigError, match=r"is already quantized .NVFP4., and quantizing takes a 16-bit model: give"):
        read_source(str(nvfp4))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(nvfp4)}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is an adapter, not a model: write `qerl merge --adapter .* --to"):
        read_source(str(adapter))


def test_a_missing_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_source(str(folder))


def test_tied_models_need_no_head_even_if_the_config_does_not_mention_tying(tmp_path):
    tensors = layout_tensors(tied=True)
    assert read_source(str(fake_checkpoint(tmp_path / "a", tensors, tie_word_embeddings=True))).quantized
    silent = fake_checkpoint(tmp_path / "b", tensors)
    config = json.loads((silent / "config.json").read_text())
    del config["tie_word_embeddings"]  # transformers 4 leaves it out where it is the default of the class
    (silent / "config.json").write_text(json.dumps(config))
    assert read_source(str(silent)).quantized
