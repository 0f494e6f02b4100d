"""An 8-bit KV cache with scale 1 is refused, before anything is loaded, for models that it ruins."""

import json

import pytest
from checkpoint_factory import fake_checkpoint, layout_tensors
from typer.testing import CliRunner

from qerl.base.errors import ConfigError
from qerl.checkpoint.resolve import ModelRef
from qerl.cli.main import app
from qerl.config.recipe import load_recipe
from qerl.engine.options import EngineOptions
from qerl.engine.vllm import opening
from qerl.engine.vllm.engine import VLLMEngine
from qerl.plan.sizes import KNOWN, check_kv_cache, sizes_of
from training.preflight.checks import read_prompts

REMEDY = "which calibrates it, or rollout.kv_cache_dtype: fp8_per_token_head, or auto"
SMALL = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "vocab_size": 320}


def check(kind, base="model", **config):
    check_kv_cache(kind, sizes_of({**KNOWN["qwen2.5-7b"], **config}, "model"), base)


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "mistral"])
def test_a_model_without_norms_on_its_keys_needs_another_type(model_type):
    with pytest.raises(ConfigError, match=REMEDY):
        check("fp8", model_type=model_type)
    for kind in ("auto", "fp8_per_token_head"):
        check(kind, model_type=model_type)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "olmo2"])
def test_families_that_norm_their_keys_go_on(model_type):
    check("fp8", model_type=model_type)


def with_scales(folder, layers, quantized=True):
    """A checkpoint of two layers, of which the first `layers` have scales for their keys and values."""
    scales = {f"model.layers.{layer}.self_attn.{name}_scale": ("F32", (1,)) for layer in range(layers) for name in "kv"}
    extra = {"quantization_config": {"quant_method": "compressed-tensors"}} if quantized else {}
    return fake_checkpoint(folder, layout_tensors() | scales, **SMALL, **extra)


def test_a_checkpoint_with_scales_for_every_layer_goes_on(tmp_path):
    config = {**SMALL, "num_hidden_layers": 2}
    check("fp8", with_scales(tmp_path / "all", 2), **config)
    for folder in (with_scales(tmp_path / "one", 1), with_scales(tmp_path / "unread", 2, quantized=False)):
        with pytest.raises(ConfigError, match="nor carries calibrated scales"):
            check("fp8", folder, **config)


def test_plan_refuses_it_in_one_line():
    command = ["plan", "--recipe", "dapo_7b", "--gpu", "h100", "--set", "rollout.kv_cache_dtype=fp8"]
    assert CliRunner().invoke(app, command).exit_code == 0  # a run calibrates
    command += ["--set", "rollout.kv_refresh=null"]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, ConfigError)
    assert REMEDY in str(refused.exception)
    assert CliRunner().invoke(app, [*command, "--model", "Qwen/Qwen3-8B"]).exit_code == 0


def test_a_run_refuses_it_before_it_reads_the_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["qwen2.5-7b"]), encoding="utf-8")
    base = ModelRef("quantized", tmp_path, str(tmp_path), None, None, "nvfp4")
    with pytest.raises(ConfigError, match=REMEDY):
        read_prompts(load_recipe("dapo_7b", ["rollout.kv_cache_dtype=fp8", "rollout.kv_refresh=null"]), base)


def test_scales_are_refreshed_of_what_has_some():
    assert load_recipe("dapo_7b", ["rollout.kv_cache_dtype=fp8", "rollout.kv_refresh=3"]).rollout.kv_refresh == 3
    with pytest.raises(ConfigError, match=r"write rollout\.kv_cache_dtype: fp8, or leave rollout\.kv_refresh out"):
        load_recipe("dapo_7b", ["rollout.kv_refresh=3"])


def test_whoever_opens_vllm_is_refused_before_it_loads(tmp_path, monkeypatch):
    for name in ("check_vllm", "check_device", "check_kv_cache_dtype"):
        monkeypatch.setattr(opening, name, lambda *_: None)
    monkeypatch.setattr(opening, "Settings", pytest.fail)
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["qwen2.5-7b"]), encoding="utf-8")
    with pytest.raises(ConfigError, match=REMEDY):
        VLLMEngine(str(tmp_path), "nvfp4", EngineOptions(kv_cache_dtype="fp8"))
