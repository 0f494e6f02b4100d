"""Merging a trained adapter of the embedded model: the tokens of base + adapter, what rounding leaves, refusals."""

import json
import math
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantize.export.run
import quantize.export.weights
from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.folder import TINY_FOLDER, format_of, kind_of
from qerl.checkpoint.output import write_weights
from qerl.checkpoint.resolve import resolve_model
from qerl.formats.nvfp4.layout import TENSORS
from qerl.formats.nvfp4.reference import dequantize
from quantize.export.effect import kl
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.export.weights import Sums, total
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.greedy_tokens import arith_prompts, engine_tokens, library_tokens, same
from tests.helpers.merged import random_adapter


@pytest.fixture(scope="module")
def prompts(base):
    return arith_prompts(base, 8)


@pytest.fixture(scope="module")
def expected(run, base, prompts):
    """Greedy tokens of the engine with the adapter. Those without it differ, so equality has a meaning."""
    tokens = engine_tokens(run, prompts)
    assert same(tokens, engine_tokens(base, prompts)) <= 3
    return tokens


@pytest.fixture(scope="module")
def bf16(run):
    return export(ExportOptions(str(run), "bf16", run.parent / "merged-bf16", max_new_tokens=16))


@pytest.fixture(scope="module")
def nvfp4(run):
    return export(ExportOptions(str(run), "nvfp4", run.parent / "merged-nvfp4", max_new_tokens=16))


@pytest.fixture(scope="module")
def exported(run):
    return export(ExportOptions(str(run), "adapter", run.parent / "exported"))


@pytest.fixture(scope="module")
def decoded(base):
    """The NVFP4 base as transformers itself decodes it, without qerl."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config).float()  # decodes to bfloat16


def test_transformers_alone_gives_the_engines_tokens_from_the_merged_model(bf16, prompts, expected):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bf16.out, dtype=torch.float32)
    assert library_tokens(model, prompts) == expected
    assert engine_tokens(bf16.out, prompts) == expected
    assert arith_prompts(bf16.out, 8) == prompts  # by its own tokenizer


def test_peft_alone_gives_the_engines_tokens_from_the_adapter_folder(exported, decoded, base, prompts, expected):
    import peft

    config = json.loads((exported.out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(TINY_FOLDER)  # from which `base` was quantized
    assert (exported.out / "tokenizer_config.json").is_file()
    assert config["target_modules"] == sorted(config["target_modules"])
    model = peft.PeftModel.from_pretrained(decoded, exported.out)
    try:
        assert library_tokens(model, prompts) == expected
    finally:
        model.unload()
    assert kind_of(exported.out) == "adapter"
    assert resolve_model(str(exported.out)).base == str(base)


def test_merged_weights_are_base_plus_s_b_a_rounded_once(bf16, run, base):
    written = load_file(bf16.out / "model.safetensors")
    tensors, scaling = read_adapter(run / "adapter")
    packed = load_file(base / "model.safetensors")
    modules = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    assert len(modules) == 28
    for module in modules:
        a, b = (tensors[f"{module}.lora_{x}.weight"].double() for x in "AB")
        decoded = dequantize(*(packed[f"{module}.{part}"] for part in TENSORS), torch.float32)
        exact = decoded.double() + scaling * (b @ a)
        half_step = exact.abs().log2().floor().exp2() / 256  # bfloat16 has 8 significant bits
        error = (written[f"{module}.weight"].double() - exact).abs()
        assert (error <= half_step + 1e-6).all(), module  # 1e-6 is for float32 sums
    assert "lm_head.weight" not in written  # tied in the base and so here
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(written[name], packed[name])


def test_the_merged_model_is_a_whole_checkpoint(bf16, base):
    names = {path.name for path in bf16.out.iterdir()}
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert wanted | {"README.md", "merge_report.json", "LICENSE"} <= names
    assert not any(name.startswith(".") for name in names)
    config = json.loads((bf16.out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert (bf16.out / "chat_template.jinja").read_bytes() == (base / "chat_template.jinja").read_bytes()
    assert kind_of(bf16.out) == "base16"


def test_bf16_keeps_the_adapter_and_says_so(bf16):
    assert bf16.warnings() == []
    assert bf16.survival.kept == pytest.approx(1.0, abs=0.01)
    assert bf16.survival.cosine > 0.98
    assert bf16.effect.kept > 0.999
    assert bf16.effect.prompts == bf16.effect.same_greedy == 32
    saved = json.loads((bf16.out / "merge_report.json").read_text())
    assert saved["effect"]["kl_base"] > 100 * saved["effect"]["kl_merged"]
    assert len(saved["layers"]) == 28


def test_nvfp4_onto_the_original_keeps_the_effect(nvfp4, prompts, expected):
    assert nvfp4.onto.endswith("tiny")
    assert format_of(nvfp4.out) is formats.NVFP4
    assert nvfp4.effect.kept > 0.9  # it was 0.99 when this test was written
    assert nvfp4.survival.kept == pytest.approx(1.0, abs=0.1)
    assert nvfp4.survival.cosine < 0.6  # there is rounding noise beside the adapter
    assert nvfp4.warnings() == []
    assert same(engine_tokens(nvfp4.out, prompts), expected) >= 7


def test_nvfp4_onto_the_4_bit_weights_loses_the_adapter_and_says_so(run, tmp_path, caplog):
    report = export(
        ExportOptions(str(run), "nvfp4", tmp_path / "out", onto="trained", prompt_count=8, max_new_tokens=16)
    )
    assert report.survival.kept < 0.2
    assert report.effect.kept < 0.3
    assert "of the adapter's effect is left" in caplog.text
    assert "of the adapter's effect is left" in (tmp_path / "out" / "README.md").read_text()


def test_bf16_onto_the_original_is_not_the_trained_policy_and_says_so(run, tmp_path):
    report = export(ExportOptions(str(run), "bf16", tmp_path / "out", onto="original", prompt_count=0))
    assert report.onto.endswith("tiny")
    assert "not the policy that was trained" in report.warnings()[0]
    assert report.effect is None


def test_a_16_bit_base_with_trained_norms_and_an_untied_head(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path / "base", "qwen2")
    adapter = random_adapter(tmp_path / "adapter", folder, train_norms=True)
    monkeypatch.setattr(quantize.export.weights, "write_weights", partial(write_weights, shard_bytes=100_000))
    report = export(ExportOptions(str(adapter), "bf16", tmp_path / "bf16", prompt_count=2, max_new_tokens=16))
    assert report.trained_norms == 4
    assert report.effect.kept > 0.99
    shards = sorted(path.name for path in (tmp_path / "bf16").glob("*.safetensors"))
    assert len(shards) > 2
    assert set(
        json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())["weight_map"].values()
    ) == set(shards)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32).state_dict()
    tensors, _ = read_adapter(adapter)
    name = "model.layers.1.input_layernorm.weight"
    assert torch.equal(merged[name], tensors[name].bfloat16().float())
    head = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()["lm_head.weight"]
    assert torch.equal(merged["lm_head.weight"], head)
    quantized = export(ExportOptions(str(adapter), "nvfp4", tmp_path / "nvfp4", prompt_count=2, max_new_tokens=8))
    assert format_of(quantized.out) is formats.NVFP4
    assert quantized.onto == str(folder)


def test_trained_norms_stay_in_the_adapter_folder_with_a_warning(tmp_path):
    folder = make_checkpoint(tmp_path / "base", "qwen3")
    adapter = random_adapter(tmp_path / "adapter", folder, train_norms=True)
    report = export(ExportOptions(str(adapter), "adapter", tmp_path / "out", dtype="bfloat16"))
    assert "vLLM refuses such a folder" in report.warnings()[0]
    assert set(report.commands) == {"chat"}
    ours, theirs = read_adapter(tmp_path / "out")[0], read_adapter(adapter)[0]
    assert all(torch.equal(ours[name], tensor.bfloat16()) for name, tensor in theirs.items())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"]


def test_survival_equals_values_computed_by_hand():
    """With delta (1, 1) and change (1, 0) on a base of norm 10, half of delta is there, at 45 degrees."""
    part = Sums("x", dot=1.0, change2=1.0, delta2=2.0, base2=100.0).survival()
    assert (part.kept, part.cosine, part.norm_ratio) == pytest.approx((0.5, math.sqrt(0.5), math.sqrt(0.5)))
    assert part.relative_size == pytest.approx(math.sqrt(2) / 10)
    nothing = Sums("y", 0.0, 0.0, 0.0, 100.0)
    assert nothing.survival().kept is None
    both = total([Sums("x", 1.0, 1.0, 2.0, 100.0), nothing])
    assert both.kept == pytest.approx(0.5)
    assert both.relative_size == pytest.approx(0.1)


def test_kl_equals_a_value_computed_by_hand():
    """One token has half the probability, one twice: (0.5 - 1 + ln 2 + 2 - 1 - ln 2) / 2."""
    assert kl([[0.0, -1.0]], [[-math.log(2), -1.0 + math.log(2)]]) == pytest.approx(0.25)
    assert kl([[-0.3], [-0.7]], [[-0.3], [-0.7]]) == 0.0


def test_trained_embeddings_do_not_change_a_tied_head_silently(tmp_path):
    base = make_checkpoint(tmp_path / "base", "qwen3")
    folder = random_adapter(tmp_path / "adapter", base)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(320, 64)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens.*save the base with a copy"):
        export(ExportOptions(str(folder), "bf16", tmp_path / "out", prompt_count=0))
    assert not (tmp_path / "out").exists()


def test_a_run_with_keys_of_another_version_is_measured_on_its_saved_prompts(run, tmp_path, caplog):
    for name in ("checkpoints", "runs"):
        shutil.copytree(run.parents[1] / name, tmp_path / name, ignore=shutil.ignore_patterns("merged*", "exported"))
    path = tmp_path / "runs" / "tiny_run" / "config.yaml"
    path.write_text(path.read_text() + "\nformer_section:\n  key: 1\n")
    report = export(ExportOptions(str(path.parent), "bf16", tmp_path / "out", max_new_tokens=8))
    assert 0 < report.effect.prompts < 32
