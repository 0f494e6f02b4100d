"""`qerl quantize` by rounding to nearest, end to end: the bits are llm-compressor's, and the result loads."""

import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from checkpoint_factory import LAYOUTS, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import CompressedTensorsConfig

from qerl.checkpoint.resolve import resolve_model
from qerl.checkpoint.shards import INDEX, read_tensors
from qerl.errors import CheckpointError, ConfigError, MissingExtraError
from qerl.nvfp4.layout import TENSORS
from qerl.nvfp4.linear import NVFP4Linear
from qerl.nvfp4.reference import dequantize, quantize, shared_global_scale
from quantize import run, writer
from quantize.compressor import load_compressor
from quantize.run import quantize_checkpoint

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def load_all(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


def llm_compressor(source, out, ignore=("lm_head",)):
    """The checkpoint as llm-compressor's own oneshot writes it."""
    load_compressor()
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=list(ignore))
    oneshot(model=str(source), tokenizer=str(source), recipe=recipe, output_dir=str(out))
    return load_all(out)


@pytest.fixture(scope="module", params=LAYOUTS)
def quantized(request, tmp_path_factory):
    """(layout, source folder, output folder, report) of a sharded model."""
    folder = tmp_path_factory.mktemp(request.param)
    source = make_checkpoint(folder / "model", request.param)
    assert len(list(source.glob("*.safetensors"))) > 1
    return request.param, source, folder / "out", quantize_checkpoint(str(source), folder / "out")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "Small-1B", "qwen2", layers=1)


def test_the_bits_are_those_of_llm_compressor(quantized, tmp_path):
    _, source, out, _ = quantized
    assert_same_tensors(load_all(out), llm_compressor(source, tmp_path / "theirs"))


def test_the_bits_are_those_of_the_reference(quantized):
    _, source, out, _ = quantized
    dense, written = load_all(source), load_all(out)
    for name, weight in dense.items():
        module, _, tensor = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        if not part.endswith("_proj") or tensor != "weight":
            continue
        mates = next((names for names in FUSED if part in names), (part,))
        scale = shared_global_scale([dense[f"{parent}.{mate}.weight"] for mate in mates])
        for key, expected in quantize(weight, scale).named().items():
            assert torch.equal(written[f"{module}.{key}"].view(torch.uint8), expected.view(torch.uint8)), module


def test_the_config_is_that_of_llm_compressor(quantized, tmp_path):
    _, source, out, _ = quantized
    llm_compressor(source, tmp_path / "theirs")
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "theirs"))
    entry, expected = ours.pop("quantization_config"), theirs.pop("quantization_config")
    assert ours == json.loads((source / "config.json").read_text())
    for key in ("format", "quant_method", "quantization_status", "ignore", "version", "kv_cache_scheme"):
        assert entry[key] == expected[key]
    group, expected_group = entry["config_groups"]["group_0"], expected["config_groups"]["group_0"]
    del expected_group["weights"]["observer"], group["weights"]["observer"]  # who looked, not what is stored
    assert group == expected_group


def dense_twin(source, out, dtype):
    """The 16-bit model with the reference's dequantized weights in the place of the quantized ones."""
    twin = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    before = twin.get_parameter("model.layers.0.mlp.up_proj.weight").clone()
    written = load_all(out)
    for name in [name for name in written if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        weight = dequantize(*(written[f"{module}.{part}"] for part in TENSORS), dtype)
        twin.get_submodule(module).weight.data.copy_(weight)
    assert not torch.equal(before, twin.get_parameter("model.layers.0.mlp.up_proj.weight"))
    return twin


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 43).view(2, 20)).logits


def test_it_loads_in_transformers_and_computes_what_the_reference_says(quantized):
    _, source, out, _ = quantized
    loaded = AutoModelForCausalLM.from_pretrained(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(dense_twin(source, out, torch.bfloat16)))


def test_it_loads_packed_in_qerl_and_computes_the_same(quantized):
    from qerl.checkpoint.load import load_model

    _, source, out, _ = quantized
    packed, twin = load_model(out, "nvfp4", dtype="float32"), dense_twin(source, out, torch.float32)
    linears = {name: module for name, module in packed.named_modules() if isinstance(module, NVFP4Linear)}
    assert len(linears) == 14
    for name, linear in linears.items():
        assert torch.equal(linear.dense(torch.float32), twin.get_submodule(name).weight)
    # Not to the bit: some CPUs' products of the same numbers round by where these lie in memory.
    torch.testing.assert_close(logits(packed), logits(twin), rtol=1e-5, atol=1e-5)


def test_the_tokenizer_and_the_small_files_come_along(quantized):
    _, source, out, report = quantized
    text = [{"role": "user", "content": "What is 3 plus 4?"}]
    ids = [AutoTokenizer.from_pretrained(folder).apply_chat_template(text)["input_ids"] for folder in (source, out)]
    assert ids[0] == ids[1]
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(report.copied_files)


def test_the_report_says_what_was_written(quantized):
    _, source, out, _ = quantized
    saved = json.loads((out / "quantize_report.json").read_text())
    dense, written = load_all(source), load_all(out)
    assert saved["bytes_before"] == sum(tensor.nbytes for tensor in dense.values())
    assert saved["bytes_after"] == sum(tensor.nbytes for tensor in written.values())
    assert (saved["source"], saved["method"], saved["scheme"]) == (str(source), "rtn", "NVFP4A16")
    assert len(saved["layers"]) == 14
    entry = next(layer for layer in saved["layers"] if layer["name"] == "model.layers.1.mlp.down_proj")
    weight = dense["model.layers.1.mlp.down_proj.weight"].double()
    decoded = dequantize(*(written[f"model.layers.1.mlp.down_proj.{part}"] for part in TENSORS), torch.float32)
    expected = 20 * torch.log10(weight.norm() / (weight - decoded.double()).norm())
    assert entry["sqnr_db"] == pytest.approx(float(expected), abs=1e-3)
    assert entry["shape"] == [64, 112]
    assert entry["global_scale"] == float(written["model.layers.1.mlp.down_proj.weight_global_scale"])
    rates = [layer["sqnr_db"] for layer in saved["layers"]]
    assert saved["sqnr_db"]["min"] == min(rates)
    assert saved["sqnr_db"]["mean"] == pytest.approx(sum(rates) / 14, abs=1e-3)
    assert 19 < min(rates) <= max(rates) < 22  # about 20.3 dB for normal weights


def test_the_table_fits_the_report(quantized):
    from rich.console import Console

    _, source, out, report = quantized
    console = Console(width=300, file=io.StringIO())
    console.print(report.table())
    text = console.file.getvalue()
    assert "14 quantized, 0 kept" in text
    assert str(source) in text
    assert str(out) in text
    assert f"lowest {report.worst().sqnr_db:.1f} dB ({report.worst().name})" in text


def test_files_can_be_read_by_others_as_far_as_the_folder(quantized):
    _, _, out, _ = quantized
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert modes == {out.stat().st_mode & 0o666}


# --- other inputs


def test_partial_quantization_by_ignore(model, tmp_path):
    report = quantize_checkpoint(str(model), tmp_path / "out", ignore=["re:.*self_attn.*"])
    kept = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    assert list(report.kept_linears) == kept
    assert_same_tensors(
        load_all(tmp_path / "out"), llm_compressor(model, tmp_path / "theirs", ["lm_head", "re:.*self_attn.*"])
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", *kept]
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    source = load_file(next(model.glob("*.safetensors")))
    name = next(name for name in source if "self_attn.q_proj.weight" in name)
    assert torch.equal(loaded.get_parameter(name), source[name])


def test_a_float32_model_keeps_its_dtype(tmp_path):
    source = make_checkpoint(tmp_path / "model", "llama", layers=1, dtype="float32")
    quantize_checkpoint(str(source), tmp_path / "out")
    assert_same_tensors(load_all(tmp_path / "out"), llm_compressor(source, tmp_path / "theirs"))
    assert load_all(tmp_path / "out")["model.norm.weight"].dtype == torch.float32


def test_a_float16_model_with_small_weights_is_scaled_in_float32(tmp_path):
    source = make_checkpoint(tmp_path / "model", "llama", layers=1, dtype="float16")
    for path in source.glob("*.safetensors"):
        small = {name: tensor * 0.01 if "_proj" in name else tensor for name, tensor in load_file(path).items()}
        save_file(small, path, metadata={"format": "pt"})
    report = quantize_checkpoint(str(source), tmp_path / "out")
    assert report.worst().sqnr_db > 19  # 0 dB when the global scale overflows float16 and becomes 1
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
    report = quantize_checkpoint(str(source), tmp_path / "out")
    layer = next(layer for layer in report.layers if layer.name.endswith("o_proj"))
    assert layer.sqnr_db is None
    saved = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert next(layer["sqnr_db"] for layer in saved["layers"] if layer["name"].endswith("o_proj")) is None
    assert report.worst() is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.0.mlp.up_proj.weight", float("nan")),
        ("model.layers.0.mlp.up_proj.weight", float("inf")),
        ("model.layers.0.mlp.up_proj.weight", -float("inf")),
        ("model.embed_tokens.weight", float("nan")),
        ("model.embed_tokens.weight", -float("inf")),
    ],
)
def test_weights_that_are_not_finite_are_named(model, tmp_path, name, value):
    source = shutil.copytree(model, tmp_path / "model")
    path = next(path for path in source.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name][5, 7] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        quantize_checkpoint(str(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_large_models_are_written_in_several_files(model, tmp_path, monkeypatch):
    quantize_checkpoint(str(model), tmp_path / "one")
    monkeypatch.setattr(run, "write_weights", lambda folder, groups: writer.write_weights(folder, groups, 30_000))
    quantize_checkpoint(str(model), tmp_path / "many")
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    assert_same_tensors(load_all(tmp_path / "many"), load_all(tmp_path / "one"))
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in read_tensors(tmp_path / "many").values())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "many").config.model_type == "qwen2"


def test_without_out_it_goes_to_checkpoints_here(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = quantize_checkpoint(str(model))
    assert str(report.out) == "checkpoints/Small-1B-NVFP4A16"
    found = resolve_model(str(model), "nvfp4")
    assert (found.kind, found.base) == ("nvfp4", "checkpoints/Small-1B-NVFP4A16")
    assert resolve_model("checkpoints/Small-1B-NVFP4A16", "bf16").base == str(model)


def test_an_existing_output_needs_overwrite_and_is_kept_when_the_new_one_fails(model, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(str(model), out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="--overwrite"):
        quantize_checkpoint(str(model), out)
    broken = shutil.copytree(model, tmp_path / "broken")
    path = sorted(broken.glob("*.safetensors"))[-1]
    save_file({n: t / 0 for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantize_checkpoint(str(broken), out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    quantize_checkpoint(str(model), out, ignore=["re:.*mlp.*"], overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before


def test_an_already_quantized_model_is_refused(model, tmp_path):
    quantize_checkpoint(str(model), tmp_path / "out")
    with pytest.raises(CheckpointError, match="is already quantized"):
        quantize_checkpoint(str(tmp_path / "out"), tmp_path / "again")


def test_too_little_space_is_noticed_before_anything_is_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr("quantize.output.SPARE_BYTES", 2**60)
    with pytest.raises(CheckpointError, match="GiB free"):
        quantize_checkpoint(str(model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_hub_id_is_quantized_from_the_cache(model, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    repo = tmp_path / "cache" / "models--some--Model-1B"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    shutil.copytree(model, repo / "snapshots" / "abc")
    report = quantize_checkpoint("some/Model-1B")
    assert (report.source, str(report.out)) == ("some/Model-1B", "checkpoints/Model-1B-NVFP4A16")
    assert resolve_model("some/Model-1B", "nvfp4").base == "checkpoints/Model-1B-NVFP4A16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "rnt"}, "--method 'rnt' is not known: write rtn, awq, gptq"),
        ({"calibration": "rows.jsonl"}, "--method rtn uses no data"),
        ({"method": "awq"}, "--method awq needs data"),
        ({"method": "awq", "calibration": "x", "calibration_size": 0}, "--calibration-size 0 must be at least 1"),
        ({"method": "gptq", "calibration": "x", "batch_size": -1}, "--batch-size -1 must be at least 1"),
        ({"method": "gptq", "calibration": "x", "sequence_length": 2048}, "is more than the model's 256 positions"),
        ({"device": "cuda:77"}, "--device cuda:77 cannot be used here"),
        ({"device": "gpu"}, "--device gpu cannot be used here"),
    ],
)
def test_options_that_cannot_be_used(model, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        quantize_checkpoint(str(model), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_without_llm_compressor_the_extra_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'qerl\[quantize\]'"):
        quantize_checkpoint(str(model), tmp_path / "out")


def test_importing_loads_neither_torch_nor_llm_compressor():
    heavy = {"torch", "transformers", "llmcompressor", "compressed_tensors", "datasets", "safetensors"}
    code = f"import sys, quantize.run; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_nothing_is_said_on_stdout_and_the_progress_on_stderr(tmp_path):
    code = "import sys; from quantize.run import *; quantize_checkpoint('tiny', sys.argv[1], device='cpu')"
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "quantizing" in done.stderr
    assert "verifying" in done.stderr
    assert "No accelerator" not in done.stderr


def test_a_full_device_is_one_clear_error(model, tmp_path, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(run, "write_weights", full)
    with pytest.raises(CheckpointError, match=r"ran out of memory while quantizing .*: write --device cpu"):
        quantize_checkpoint(str(model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
