"""FP8 models from end to end on the transformers engine: quantized, read, trained, evaluated, merged, exported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from eval.run import run_eval
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.folder import format_of
from qerl.checkpoint.load import load_model
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import read_json
from qerl.config.recipe import load_recipe, recipe_names
from qerl.formats import FP8_BLOCK
from qerl.formats.fp8 import reference
from qerl.formats.fp8.format import rounds_input
from qerl.formats.fp8.linear import FP8Linear
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_tensors import tensors_in
from tests.helpers.merged import random_adapter
from tests.helpers.small_run import numbers, small_config
from training.run import start

pytestmark = pytest.mark.usefixtures("one_thread")

IN_FP8 = ("model.format=fp8_block", "noise.enabled=false", "run.save_every=1")
QAT = (*IN_FP8, "qat.mode=weights", "qat.quant_cfg.weights.format=fp8_block", "optim.learning_rate=1e-3")


def same_weight(tensors, module, weight, scales="pow2"):
    expected = reference.quantize(weight, scales).named()
    return all(
        torch.equal(tensors[f"{module}.{n}"].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items()
    )


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("fp8") / "qwen3-FP8_BLOCK"
    quantize_checkpoint(str(base), out, QuantizeOptions(scheme="fp8_block", ignore=("re:.*layers.1.self_attn.*",)))
    return out


@pytest.fixture
def of_others(folder, tmp_path):
    """The same model as DeepSeek and Qwen lay it out, with scales that are no powers of two."""
    out = shutil.copytree(folder, tmp_path / "others")
    config = read_json(out / "config.json")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (out / "config.json").write_text(json.dumps(config))
    tensors = tensors_in(folder)
    for file in out.glob("*.safetensors*"):
        file.unlink()
    scales = [name for name in tensors if name.endswith("weight_scale")]
    tensors |= {f"{name}_inv": 0.9 * tensors.pop(name) for name in scales}
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_a_quantized_folder_holds_the_reference_s_bytes(base, tmp_path, scales):
    options = QuantizeOptions(scheme="fp8_block", scales=scales)
    report = quantize_checkpoint(str(base), tmp_path / "out", options)
    assert (report.scheme, report.scales, report.method) == ("FP8_BLOCK", scales, "rtn")
    assert report.worst().sqnr_db > 30
    dense, written = tensors_in(base), tensors_in(tmp_path / "out")
    modules = [layer.name for layer in report.layers]
    assert len(modules) == 14
    assert all(same_weight(written, module, dense[f"{module}.weight"], scales) for module in modules)
    assert all(torch.equal(written[name], dense[name]) for name in written if "_proj" not in name)
    made = read_json(tmp_path / "out" / "quantize_report.json")
    assert (made["format"], made["scales"], made["global_scale"]) == ("float-quantized", scales, None)


def test_a_folder_opens_as_the_model_of_its_decoded_weights(folder):
    """compressed-tensors decodes the same, and so it is a standard file."""
    model = load_model(folder, "fp8_block", "float32")
    packed = [module for module in model.modules() if isinstance(module, FP8Linear)]
    assert len(packed) == 10  # 4 stay in 16 bits
    whole = CompressedTensorsConfig(dequantize=True)
    twin = AutoModelForCausalLM.from_pretrained(folder, quantization_config=whole, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            assert torch.equal(twin.get_submodule(name).weight, module.unpack(torch.float32)), name


def test_a_folder_in_the_layout_of_others_is_read_as_it_is(of_others, folder):
    assert format_of(of_others) is FP8_BLOCK
    assert resolve_model(str(of_others)).format == "fp8_block"
    model, own = load_model(of_others, "fp8_block", "float32"), load_model(folder, "fp8_block", "float32")
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            theirs = own.get_submodule(name)
            assert torch.equal(module.weight_codes.view(torch.uint8), theirs.weight_codes.view(torch.uint8))
            assert torch.equal(module.weight_scale, 0.9 * theirs.weight_scale)
            assert module.scales == "fp32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors[name + "_scale"].zero_(), "1 of 1 scales are zero, negative, infinite or NaN"),
        (lambda tensors, name: tensors.pop(name + "_scale"), "as F8_E4M3 without scales"),
        (lambda tensors, name: tensors.update({name: tensors[name].float()}), "FP8 weights are torch.float8_e4m3fn"),
        (lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(1, 1)}), "no place for"),
    ],
    ids=["zero", "no scale", "cast", "twice"],
)
def test_a_damaged_folder_is_refused_in_one_line(folder, tmp_path, change, message):
    out = shutil.copytree(folder, tmp_path / "damaged")
    for file in out.glob("*.safetensors*"):
        file.unlink()
    tensors = tensors_in(folder)
    change(tensors, "model.layers.0.mlp.up_proj.weight")
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as refused:
        load_model(out, "fp8_block", "float32")
    assert "\n" not in str(refused.value)


def test_a_merged_model_leaves_inputs_in_16_bits_if_its_base_does(base, tmp_path):
    quantize_checkpoint(str(base), tmp_path / "out", QuantizeOptions(scheme="fp8_block", activations="none"))
    adapter = str(random_adapter(tmp_path / "adapter", base))
    for model, rounds in ((tmp_path / "out", False), (base, True)):
        to = tmp_path / f"merged-{rounds}"
        export(ExportOptions(adapter, "fp8_block", to, str(model), prompt_count=0, onto="trained"))
        assert rounds_input(read_json(to / "config.json")["quantization_config"]) is rounds


def test_an_adapter_is_trained_beside_the_base_and_merged(folder, of_others, base, tmp_path):
    run = start(small_config(folder, tmp_path, *IN_FP8, steps=1), "tiny").run_dir
    assert numbers(run)[0]["mismatch_kl"] < 1e-8
    assert resolve_model(str(run)).format == "fp8_block"
    assert run_eval(EvalSettings(task="arith", model=str(run), limit=2, max_new_tokens=4, out=tmp_path / "eval"))
    adapter = random_adapter(tmp_path / "adapter", base)
    for number, model in enumerate((folder, of_others)):
        out = tmp_path / f"merged{number}"
        merged = export(ExportOptions(str(adapter), "fp8_block", out, str(model), prompt_count=0, onto="trained"))
        assert (format_of(merged.out), merged.kind) == (FP8_BLOCK, "FP8 model")
        module = "model.layers.0.mlp.up_proj"
        factors = load_file(adapter / "adapter_model.safetensors")
        a, b = (factors[f"base_model.model.{module}.lora_{which}.weight"].float() for which in "AB")
        before = tensors_in(model)
        weight = reference.dequantize(before[f"{module}.weight"], before[f"{module}.weight_scale"], torch.float32)
        assert same_weight(tensors_in(merged.out), module, weight.add_(2.0 * b @ a))
        load_model(merged.out, "fp8_block", "float32")


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A run of two steps that trains whole weights, rewritten in place in FP8."""
    torch.set_num_threads(1)
    given = (r"qat.quant_cfg.ignore=[lm_head, 're:model\.layers\.1\.']", "run.keep_checkpoints=9")
    config = small_config(base, tmp_path_factory.mktemp("qat"), *QAT, *given, steps=2)
    return start(config, "qat").run_dir


def test_the_model_of_trained_weights_is_the_masters_quantized(trained, base, tmp_path):
    masters = tensors_in(trained / "checkpoints/step-000002/weights")
    assert not rounds_input(read_json(trained / "base/config.json")["quantization_config"])
    begun, model, dense = tensors_in(trained / "base"), tensors_in(trained / "model"), tensors_in(base)
    assert len(masters) == 7
    for name, master in masters.items():
        module = name.removesuffix(".weight")
        assert same_weight(begun, module, dense[name].float())
        assert same_weight(model, module, master)
        assert not torch.equal(begun[name].view(torch.uint8), model[name].view(torch.uint8))
    assert numbers(trained)[1]["mismatch_kl"] < 1e-8
    exported = export(ExportOptions(str(trained), out=tmp_path / "out"))
    assert exported.to == "fp8_block"
    assert exported.lowest_sqnr_db > 25
    assert (exported.out / "model.safetensors").read_bytes() == (trained / "model/model.safetensors").read_bytes()
    dense = export(ExportOptions(str(trained), "bf16", out=tmp_path / "dense"))
    assert torch.equal(tensors_in(dense.out)[name], masters[name].bfloat16())


def test_whole_weights_are_trained_with_rounded_inputs(base, tmp_path):
    run = start(small_config(base, tmp_path, *QAT, "qat.quant_cfg.activations=dynamic", steps=1), "qat").run_dir
    for name in ("base", "model"):
        assert rounds_input(read_json(run / name / "config.json")["quantization_config"])
    assert numbers(run)[0]["mismatch_kl"] < 1e-8


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.endswith("_fp8")])
def test_a_recipe_differs_from_that_of_4_bits_in_format_and_noise_alone(name):
    twin, base = load_recipe(name), load_recipe(name.removesuffix("_fp8"))
    assert (twin.model.format, twin.noise.enabled) == ("fp8_block", False)
    assert twin.model_copy(update={"model": base.model, "noise": base.noise}) == base
    assert twin.model.model_copy(update={"format": "nvfp4"}) == base.model


# --- runs whose trainer multiplies in FP8
MASTERS = ("model.format=fp8_block", "qat.quant_cfg=fp8_block", "qat.forward=masters")
STILL = ("noise.enabled=false", "loss.mismatch_gate=null")


@pytest.mark.parametrize(
    ("overrides", "agrees"),
    [
        (("model.format=bf16", "train.fp8_recipe=tensorwise"), False),
        (MASTERS, False),
        (("model.format=bf16", "train.fp8_recipe=tensorwise_gradients", "run.gradient_checkpointing=true"), True),
        ((*MASTERS, "train.fp8_recipe=tensorwise"), True),
        (("qat.mode=weights", "train.fp8_recipe=tensorwise_gradients"), True),
    ],
    ids=["adapter", "its gradients", "masters", "both", "gradients through NVFP4"],
)
def test_a_run_is_as_far_from_its_engine_as_their_products_are(base, tmp_path, overrides, agrees):
    """Random weights show the rounding to 8 bits as 0.02 to 0.04. Under powers of two one scale rounds as many do."""
    run = start(small_config(base, tmp_path, *STILL, *overrides, steps=2), "fp8").run_dir
    assert numbers(run)[1]["grad_norm"] > 0
    low, high = (0, 1e-6) if agrees else (1e-3, 0.1)
    assert all(low <= row["mismatch_kl"] < high for row in numbers(run))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.fp8_products=gradients"], "this key is gone; write train.fp8_recipe: tensorwise_gradients"),
        (["train.fp8_recipe=tensorwise", "adapter.dropout=0.1"], "write adapter.dropout: 0"),
        (["train.fp8_recipe=tensorwise", "loss.correction.mode=off", *STILL], "has to be corrected for"),
        (["train.fp8_recipe=blockwise", "qat.quant_cfg=nvfp4_w4a4"], "are rounded to 4 bits already"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(overrides, says):
    with pytest.raises(ConfigError) as refused:
        load_recipe("dapo_7b", overrides)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
