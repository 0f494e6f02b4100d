"""`qerl quantize` with unusual models and options, and what it refuses."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError, MissingExtraError
from qerl.checkpoint import output as writer
from qerl.checkpoint.experts import fused
from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import INDEX, read_tensors
from qerl.formats.nvfp4 import reference
from qerl.formats.nvfp4.reference import quantize
from quantize import compressor, run
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.checkpoint_tensors import assert_same_tensors, llm_compressor, load_all
from tests.helpers.merged import random_adapter
from tests.helpers.model_folders import hub_snapshot
from tests.helpers.roundings import ROUNDING, rounding
from tests.helpers.row_files import write_sums


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "Small-1B", "qwen2", layers=1)


# --- other inputs


def test_partial_quantization_by_ignore(model, tmp_path):
    report = quantize_checkpoint(str(model), tmp_path / "out", rounding(ignore=("re:.*self_attn.*",)))
    kept = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    assert list(report.kept_linears) == kept
    assert_same_tensors(
        load_all(tmp_path / "out"), llm_compressor(model, tmp_path / "theirs", ["lm_head", "re:.*self_attn.*"])
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", *kept]


def test_a_float16_model_with_small_weights_is_scaled_in_float32(tmp_path):
    source = make_checkpoint(tmp_path / "model", "llama", layers=1, dtype="float16")
    for path in source.glob("*.safetensors"):
        small = {name: tensor * 0.01 if "_proj" in name else tensor for name, tensor in load_file(path).items()}
        save_file(small, path, metadata={"format": "pt"})
    report = quantize_checkpoint(str(source), tmp_path / "out", ROUNDING)
    assert report.worst().sqnr_db > 19  # it is 0 dB if the global scale overflows float16 and becomes 1
    written, dense = load_all(tmp_path / "out"), load_all(source)
    assert written["model.norm.weight"].dtype == torch.float16
    expected = quantize(dense["model.layers.0.mlp.down_proj.weight"].float())
    assert torch.equal(written["model.layers.0.mlp.down_proj.weight_packed"], expected.packed)


def test_a_layer_of_zeros_has_no_sqnr_and_stays_zero(model, tmp_path):
    source = shutil.copytree(model, tmp_path / "model")
    path = next(
        path for path in source.glob("*.safetensors") if "model.layers.0.self_attn.o_proj.weight" in load_file(path)
    )
    save_file({n: t * 0 if "o_proj" in n else t for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    report = quantize_checkpoint(str(source), tmp_path / "out", ROUNDING)
    layer = next(layer for layer in report.layers if layer.name.endswith("o_proj"))
    assert layer.sqnr_db is None
    saved = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert next(layer["sqnr_db"] for layer in saved["layers"] if layer["name"].endswith("o_proj")) is None
    assert report.worst() is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.0.mlp.up_proj.weight", float("nan")),
        ("model.layers.0.mlp.up_proj.weight", -float("inf")),
        ("model.embed_tokens.weight", float("nan")),
    ],
)
def test_weights_that_are_not_finite_are_named(model, tmp_path, name, value):
    source = shutil.copytree(model, tmp_path / "model")
    path = next(path for path in source.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name][5, 7] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        quantize_checkpoint(str(source), tmp_path / "out", ROUNDING)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_large_models_are_written_in_several_files(model, tmp_path, monkeypatch):
    quantize_checkpoint(str(model), tmp_path / "one", ROUNDING)
    monkeypatch.setattr(run, "write_weights", lambda folder, groups: writer.write_weights(folder, groups, 30_000))
    quantize_checkpoint(str(model), tmp_path / "many", ROUNDING)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    assert_same_tensors(load_all(tmp_path / "many"), load_all(tmp_path / "one"))
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in read_tensors(tmp_path / "many").values())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "many").config.model_type == "qwen2"


def test_without_out_it_writes_to_checkpoints_in_this_folder(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = quantize_checkpoint(str(model), options=ROUNDING)
    assert str(report.out) == "checkpoints/Small-1B-NVFP4A16"
    found = resolve_model(str(model), "nvfp4")
    assert (found.kind, found.base) == ("quantized", "checkpoints/Small-1B-NVFP4A16")
    assert resolve_model("checkpoints/Small-1B-NVFP4A16", "bf16").base == str(model)


def test_an_existing_output_needs_overwrite_and_is_kept_when_the_new_one_fails(model, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(str(model), out, ROUNDING)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="--overwrite"):
        quantize_checkpoint(str(model), out, ROUNDING)
    broken = shutil.copytree(model, tmp_path / "broken")
    path = sorted(broken.glob("*.safetensors"))[-1]
    save_file({n: t / 0 for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantize_checkpoint(str(broken), out, rounding(overwrite=True))
    assert (out / "model.safetensors").read_bytes() == before
    quantize_checkpoint(str(model), out, rounding(ignore=("re:.*mlp.*",), overwrite=True))
    assert (out / "model.safetensors").read_bytes() != before


def test_a_hub_id_is_quantized_from_the_cache(model, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    hub_snapshot(tmp_path / "cache", "some/Model-1B", lambda folder: shutil.copytree(model, folder))
    report = quantize_checkpoint("some/Model-1B", options=ROUNDING)
    assert (report.source, str(report.out)) == ("some/Model-1B", "checkpoints/Model-1B-NVFP4A16")
    assert resolve_model("some/Model-1B", "nvfp4").base == "checkpoints/Model-1B-NVFP4A16"


def test_without_llm_compressor_the_extra_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr(compressor, "load_compressor", compressor.load_compressor.__wrapped__)  # an earlier test did
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'qerl\[quantize\]'"):
        quantize_checkpoint(str(model), tmp_path / "out", QuantizeOptions("gptq"))


def test_a_full_device_gives_one_clear_error(model, tmp_path, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(run, "write_weights", full)
    with pytest.raises(CheckpointError, match=r"ran out of memory while quantizing .*: write --device cpu"):
        quantize_checkpoint(str(model), tmp_path / "out", ROUNDING)
    assert list(tmp_path.iterdir()) == []


POW2 = rounding(global_scale="pow2")


def sets_of(tensors):
    """Modules that share a global scale, q/k/v and gate/up of a layer, and each other quantized linear alone."""
    return fused(sorted(name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")))


@pytest.fixture(scope="module", params=["bfloat16", "float32", "float16"])
def source(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param) / "model", "qwen2", layers=2, dtype=request.param)


def test_rounding_writes_the_reference_s_bytes(source, tmp_path):
    report = quantize_checkpoint(str(source), tmp_path / "out", POW2)
    dense, written = load_all(source), load_all(tmp_path / "out")
    sets = sets_of(written)
    assert sum(map(len, sets)) == len(report.layers) == 14
    assert json.loads((tmp_path / "out" / "quantize_report.json").read_text())["global_scale"] == "pow2"
    for modules in sets:
        weights = [dense[f"{module}.weight"] for module in modules]
        weights = [weight.float() if weight.dtype == torch.float16 else weight for weight in weights]
        scale = reference.shared_global_scale(weights, "pow2")
        assert math.frexp(scale.item())[0] == 0.5
        for module, weight in zip(modules, weights, strict=True):
            for name, tensor in reference.quantize(weight, scale).named().items():
                assert torch.equal(tensor.view(torch.uint8), written[f"{module}.{name}"].view(torch.uint8))
    rest = [name for name in written if ".weight_" not in name]
    assert all(torch.equal(written[name], dense[name]) for name in rest)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_calibrated_methods_write_them_too(tmp_path, method):
    source = make_checkpoint(tmp_path / "model", "qwen2", layers=1)
    rows = write_sums(tmp_path / "rows.jsonl", 60)
    options = QuantizeOptions(method, "pow2", calibration=rows, calibration_size=2, sequence_length=32)
    report = quantize_checkpoint(str(source), tmp_path / "out", options)
    dense, written = load_all(source), load_all(tmp_path / "out")
    for modules in sets_of(written):
        scales = {written[f"{module}.weight_global_scale"].item() for module in modules}
        assert len(scales) == 1
        assert math.frexp(scales.pop())[0] == 0.5
        if method == "gptq":  # AWQ changes the weights first
            weights = [dense[f"{module}.weight"].float() for module in modules]
            scale = reference.shared_global_scale(weights, "pow2")
            assert torch.equal(scale, written[f"{modules[0]}.weight_global_scale"])
    assert report.global_scale == "pow2"
    assert report.worst().sqnr_db > 12


def scales_of(folder):
    return {name: tensor.item() for name, tensor in load_all(folder).items() if name.endswith("weight_global_scale")}


@pytest.mark.parametrize("onto", ["original", "trained"])
def test_a_merge_keeps_them_where_the_weights_have_not_outgrown_them(tmp_path, onto):
    source = make_checkpoint(tmp_path / "model", "qwen2", layers=2)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    quantize_checkpoint(str(source), base, POW2)
    random_adapter(adapter, source)
    grown = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[grown] *= 200
    save_file(tensors, adapter / "adapter_model.safetensors")
    export(ExportOptions(str(adapter), "nvfp4", tmp_path / "out", str(base), onto, prompt_count=0))
    before, after = scales_of(base), scales_of(tmp_path / "out")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"model.layers.1.mlp.{leaf}_proj.weight_global_scale" for leaf in ("gate", "up")}
    assert all(math.frexp(scale)[0] == 0.5 for scale in after.values())
    assert all(after[name] < before[name] for name in changed)
