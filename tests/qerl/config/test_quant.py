"""The section qat: presets, files and keys give one value; names of other trainers lead to ours."""

import pytest

from qerl.base.errors import ConfigError
from qerl.config.quant import QuantConfig
from qerl.config.recipe import load_config, load_recipe, save_config
from training.preflight.plan import check_ranks

ON = "qat.mode=weights"


def quant_of(*overrides):
    return load_recipe("tiny", [*overrides]).qat.quant_cfg


def test_a_recipe_without_it_trains_an_adapter():
    assert load_recipe("tiny").qat is None
    assert load_recipe("qat_tiny", ["qat=null"]).qat is None


def test_presets_files_and_keys_give_the_same_value(tmp_path):
    file = tmp_path / "ffn.yaml"
    file.write_text("ignore: [lm_head, 're:.*_attn.*']\n")
    by_name, by_file = quant_of("qat.quant_cfg=nvfp4_w4a16_ffn"), quant_of(f"qat.quant_cfg={file}")
    by_keys = quant_of(ON, "qat.quant_cfg.ignore=[lm_head, 're:.*_attn.*']")
    assert by_name == by_file == by_keys != QuantConfig()
    assert quant_of(ON) == quant_of("qat.quant_cfg=nvfp4_w4a16") == QuantConfig()


def test_keys_change_a_preset_and_what_is_saved_is_complete(tmp_path):
    config = load_recipe("tiny", ["qat.quant_cfg=nvfp4_w4a16_ffn", "qat.quant_cfg.activations=dynamic"])
    assert config.qat.quant_cfg.ignore == ("lm_head", "re:.*_attn.*")
    assert config.qat.quant_cfg.activations == "dynamic"
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_the_model_s_format_is_that_of_what_is_packed(tmp_path):
    config = load_recipe("qat_tiny", ["qat.quant_cfg=fp8_block"])
    assert (config.model.format, config.qat.quant_cfg.activations) == ("fp8_block", "dynamic")
    file = tmp_path / "fp8.yaml"
    file.write_text("weights: {format: fp8_block}\n")
    assert load_recipe("qat_tiny", [f"qat.quant_cfg={file}"]).model.format == "fp8_block"
    for format in ("nvfp4", "bf16"):
        with pytest.raises(ConfigError, match=r"write model.format: fp8_block, or another qat\.quant_cfg$"):
            load_recipe("qat_tiny", ["qat.quant_cfg=fp8_block", f"model.format={format}"])
    with pytest.raises(ConfigError, match=r"write model\.format: nvfp4, or another qat\.quant_cfg$"):
        load_recipe("tiny_fp8", ["qat.mode=weights"])


CALIBRATED_IN_VAIN = r"only static scales .* write qat\.quant_cfg\.calibration\.data: null"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["qat.targets=[]"], r"no linear would be trained; write qat\.targets: null, for all that are packed, or patt"),
        (["qat.quant_cfg=nvfp4_w4a4", "qat.quant_cfg.calibration.data=arith"], CALIBRATED_IN_VAIN),
        (["validation.rows=4"], r"did you mean validation\.limit"),
    ],
)
def test_keys_that_nothing_would_come_of_are_refused(overrides, says):
    with pytest.raises(ConfigError, match=says):
        load_recipe("qat_tiny", overrides)


def test_masters_that_the_trainer_multiplies_by_are_corrected_for_and_see_a_second_update():
    config = load_recipe("dapo_7b", [ON, "qat.forward=masters", "loss.num_iterations=2"])
    with pytest.raises(ConfigError, match="write --gpus 1, or"):
        check_ranks(config, 2)
    given = ["noise.enabled=false", "loss.correction.mode=off"]
    assert load_recipe("dapo_7b", [ON, *given]).qat.forward == "packed"
    with pytest.raises(ConfigError, match="completions of the packed weights would be taken for those of the masters"):
        load_recipe("dapo_7b", [ON, *given, "qat.forward=masters"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("qat.quant_cfg=nvfp4_w4a1", "there is no such preset; write qat.quant_cfg: nvfp4_w4a16, or "),
        ("qat.quant_cfg=none.yaml", "that file cannot be read"),
        ("qat={quant_cfg: {wieghts: 3}}", "unknown key; did you mean qat.quant_cfg.weights?"),
        ("qat.mode=w4a16", "expected one of weights, adapter"),
        ("qat=off", "write keys under it, or qat: null"),
        (
            "qat.quant_cfg={activations: static, weights: {format: fp8_block}}",
            "activations before FP8 weights have dynamic scales only; write qat.quant_cfg.activations: dynamic",
        ),
        ("qat.targets=down_proj", "expected list of text or null; the default is null"),
        ("policy={quant_cfg: nvfp4_w4a16}", "policy.quant_cfg: unknown key; did you mean qat.quant_cfg?"),
        ("rollout.quant_cfg=nvfp4_w4a16", "rollout.quant_cfg: unknown key; did you mean qat.quant_cfg?"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_write(override, says):
    with pytest.raises(ConfigError) as refused:
        load_recipe("tiny", [override])
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"--set {override}") or "so far" in says
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.format=bf16", "the engine would sample from other weights than those that are trained"),
        ("loss.kl_coef=0.1", "those that they start from are not kept; write loss.kl_coef: 0"),
        ("loss.num_iterations=2", "a second update on it would not see the first; write loss.num_iterations: 1"),
        ("rollout.kernel=marlin", "that kernel cannot take weights that change"),
        ("adapter.dropout=0.1", "without an adapter, .*; write adapter.dropout: 0.0, or qat.mode: adapter"),
        ("adapter.train_norms=true", "without an adapter, .*; write adapter.train_norms: false"),
        ("qat.start_in=host", "are not kept; write qat.start_in: auto, or qat.mode: adapter"),
    ],
)
def test_what_cannot_be_combined_is_refused(override, says):
    if not override.startswith("qat"):
        load_recipe("dapo_7b", [override, "noise.where=rollout"])
    with pytest.raises(ConfigError, match=says):
        load_recipe("dapo_7b", [ON, override])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("loss.num_iterations=2", "is packed when a rollout begins.*write loss.num_iterations: 1"),
        ("adapter.dropout=0.1", "the section adapter says what of them; write adapter.dropout: 0"),
        ("qat.targets=['re:.*mlp.*']", r"qat.targets \[re:.*mlp.*\].*; write qat.targets: null, or qat.mode: weights"),
        ("qat.masters=float32", "the section adapter says what of them; write qat.masters: auto"),
        ("qat.train_norms=true", "the section adapter says what of them; write qat.train_norms: false"),
        ("qat.forward=masters", "write qat.forward: packed, or qat.mode: weights"),
        ("rollout.kernel=marlin", "that kernel cannot take weights that change"),
    ],
)
def test_what_an_adapter_through_the_quantizer_cannot_have(override, says):
    given = ["qat.mode=adapter", "loss.kl_coef=0.1", "adapter.train_norms=true", "noise.where=rollout"]
    assert load_recipe("dapo_7b", given).qat.start_in == "auto"
    with pytest.raises(ConfigError, match=says):
        load_recipe("dapo_7b", [*given, override])
