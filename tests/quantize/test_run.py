"""`qerl quantize` by rounding to nearest, end to end: it gives llm-compressor's bits, and the result loads."""

import io
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import CompressedTensorsConfig

from qerl.formats.nvfp4.layout import TENSORS
from qerl.formats.nvfp4.reference import dequantize
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import LAYOUTS, make_checkpoint
from tests.helpers.checkpoint_tensors import assert_same_tensors, llm_compressor, load_all
from tests.helpers.roundings import ROUNDING, rounding


@pytest.fixture(scope="module", params=LAYOUTS)
def quantized(request, tmp_path_factory):
    """(layout, source folder, output folder, report) of a sharded model."""
    folder = tmp_path_factory.mktemp(request.param)
    source = make_checkpoint(folder / "model", request.param)
    assert len(list(source.glob("*.safetensors"))) > 1
    return request.param, source, folder / "out", quantize_checkpoint(str(source), folder / "out", ROUNDING)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "Small-1B", "qwen2", layers=1)


def test_bits_and_config_are_those_of_llm_compressor(quantized, tmp_path):
    _, source, out, _ = quantized
    assert_same_tensors(load_all(out), llm_compressor(source, tmp_path / "theirs"))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "theirs"))
    entry, expected = ours.pop("quantization_config"), theirs.pop("quantization_config")
    assert ours == json.loads((source / "config.json").read_text())
    for key in ("format", "quant_method", "quantization_status", "ignore", "version", "kv_cache_scheme"):
        assert entry[key] == expected[key]
    group, expected_group = entry["config_groups"]["group_0"], expected["config_groups"]["group_0"]
    del expected_group["weights"]["observer"], group["weights"]["observer"]  # how scales were found, not what is stored
    assert group == expected_group


def dense_twin(source, out, dtype):
    """The 16-bit model, with weights that the reference quantized and dequantized."""
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


def test_the_tokenizer_and_the_small_files_are_copied(quantized):
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


def test_the_table_shows_the_report(quantized):
    from rich.console import Console

    _, source, out, report = quantized
    console = Console(width=300, file=io.StringIO())
    console.print(report.table())
    text = console.file.getvalue()
    assert "14 quantized, 0 kept" in text
    assert str(source) in text
    assert str(out) in text
    assert f"lowest {report.worst().sqnr_db:.1f} dB ({report.worst().name})" in text


def test_stdout_stays_empty_and_progress_goes_to_stderr(model, tmp_path, capfd):
    quantize_checkpoint(str(model), tmp_path / "out", rounding(device="cpu"))
    out, err = capfd.readouterr()
    assert out == ""
    assert "quantizing" in err
    assert "verifying" in err
