"""`qerl quantize --activations`: folders whose linears round their input, by dynamic or by calibrated scales."""

import json

import pytest
import torch

from qerl.base.errors import CheckpointError
from qerl.checkpoint.activations import input_scales, kind_of_activations, read_activations
from qerl.checkpoint.load import load_model, load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from qerl.formats import NVFP4
from quantize.calibration import HELD_OUT, load_calibration
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.checkpoint_tensors import FUSED, load_all
from tests.helpers.roundings import rounding

LENGTH = 32
ROWS = {"calibration_size": 8, "sequence_length": LENGTH}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source") / "Small-1B", "qwen2", layers=2)


@pytest.fixture(scope="module")
def static(source, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("static") / "out"
    options = QuantizeOptions("rtn", activations="static", calibration=rows, **ROWS)
    return out, quantize_checkpoint(str(source), out, options)


@pytest.fixture(scope="module")
def plain(source, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "out"
    return out, quantize_checkpoint(str(source), out, QuantizeOptions("rtn", calibration=rows, **ROWS))


def test_static_scales_are_those_of_a_run_and_the_weights_those_without_them(static, plain, source, rows):
    out, report = static
    written, weights = load_all(out), load_all(plain[0])
    scales = {name: written.pop(name) for name in list(written) if name.endswith(".input_global_scale")}
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name].view(torch.uint8), weights[name].view(torch.uint8)) for name in weights)
    sequences = load_calibration(rows, load_tokenizer(source), 8, LENGTH, HELD_OUT).sequences
    modules = [layer.name for layer in report.layers]
    expected = input_scales(load_model(source, "bf16"), modules, sequences, headroom_bits=2)
    assert {name.removesuffix(".input_global_scale"): scale for name, scale in scales.items()} == expected
    for part in FUSED[0]:
        assert expected[f"model.layers.1.self_attn.{part}"] == expected["model.layers.1.self_attn.q_proj"]
    assert report.calibration["tokens"] == 8 * LENGTH


def test_dynamic_scales_take_no_rows(source, tmp_path):
    report = quantize_checkpoint(str(source), tmp_path / "out", rounding(activations="dynamic"))
    assert (report.method, report.scheme, report.activations) == ("rtn", "NVFP4-DYNAMIC", "dynamic")
    assert kind_of_activations(tmp_path / "out", NVFP4) == "dynamic"
    assert {each.kind for each in read_activations(tmp_path / "out", NVFP4).values()} == {"dynamic"}
    assert load_model(tmp_path / "out", "nvfp4").model.layers[0].mlp.up_proj.activations.kind == "dynamic"


def test_the_errors_are_those_of_the_model_with_rounded_inputs(static, plain, source, rows):
    out, report = static
    tokens = torch.tensor(load_calibration(rows, load_tokenizer(source), 8, LENGTH, HELD_OUT).held_out)
    with torch.no_grad():
        p, q = (load_model(*each)(tokens).logits[:, :-1].log_softmax(-1) for each in ((source, "bf16"), (out, "nvfp4")))
    assert report.outputs.written.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert report.outputs.written.kl > 1.2 * plain[1].outputs.written.kl


def test_gptq_is_judged_beside_rounding_with_the_same_activations(source, rows, static, tmp_path):
    options = QuantizeOptions(activations="static", calibration=rows, **ROWS)
    report = quantize_checkpoint(str(source), tmp_path / "out", options)
    assert report.method == "search_gptq"
    assert report.outputs.rounded.kl == pytest.approx(static[1].outputs.written.kl, rel=1e-3)


def test_the_config_is_that_of_llm_compressor_and_the_folder_is_found_by_its_name(source, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = quantize_checkpoint(
        str(source), options=QuantizeOptions("rtn", activations="static", calibration=rows, **ROWS)
    )
    assert str(report.out) == "checkpoints/Small-1B-NVFP4"
    group = json.loads((report.out / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert (group["input_activations"]["dynamic"], group["input_activations"]["num_bits"]) == ("local", 4)
    assert resolve_model(str(report.out)).format == "nvfp4"
    assert json.loads((report.out / "quantize_report.json").read_text())["activations"] == "static"


def test_a_scale_that_was_not_written_is_found(source, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("quantize.run.with_input_scales", lambda groups, scales: groups)
    options = QuantizeOptions("rtn", activations="static", calibration=rows, **ROWS)
    with pytest.raises(CheckpointError, match=r"input_global_scale is missing \(14 such names\)"):
        quantize_checkpoint(str(source), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
