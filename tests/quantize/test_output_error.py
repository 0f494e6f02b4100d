"""Calibrated methods are judged by their outputs on held-out rows, and what is judged bad is kept beside."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from qerl.base.errors import CheckpointError
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.verify import FailedCheck
from quantize import compressor, output_error
from quantize.calibration import HELD_OUT, load_calibration
from quantize.options import QuantizeOptions
from quantize.output_error import judge
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.roundings import ROUNDING
from tests.helpers.row_files import write_sums

LENGTH = 48
DOWN = "model.layers.0.mlp.down_proj"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("rows") / "rows.jsonl", 240)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model in which a few channels are 300 times the others, as in trained models."""
    folder = make_checkpoint(tmp_path_factory.mktemp("source") / "model", "qwen2", layers=2)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("layernorm.weight"):
                tensors[name][[5, 20, 41]] *= 300
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def options(rows, method="gptq", **values):
    return QuantizeOptions(method, calibration=rows, calibration_size=8, sequence_length=LENGTH, batch_size=4, **values)


@pytest.fixture(scope="module")
def by_gptq(source, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("gptq") / "out"
    return out, quantize_checkpoint(str(source), out, options(rows))


def held_out(folder, rows):
    return torch.tensor(load_calibration(rows, load_tokenizer(folder), 8, LENGTH, HELD_OUT).held_out)


def test_sound_gptq_of_a_model_with_outlier_channels_is_not_refused(by_gptq):
    """Its weights are wrong where inputs are small: under the 10 dB that rounding is held to."""
    out, report = by_gptq
    assert report.worst().sqnr_db < 10
    assert report.outputs.held_out
    mean = [sum(errors.values()) / 14 for errors in (report.outputs.linears, report.outputs.rounded_linears)]
    assert mean[0] < 0.8 * mean[1] < 0.1
    saved = json.loads((out / "quantize_report.json").read_text())
    assert saved["outputs"]["written"]["kl"] == report.outputs.written.kl
    assert saved["outputs"]["sequences"] == HELD_OUT
    assert all(0 < layer["output_error"] < 0.2 for layer in saved["layers"])


def test_the_errors_are_those_of_whole_models(by_gptq, source, rows, tmp_path):
    out, report = by_gptq
    quantize_checkpoint(str(source), tmp_path / "rtn", ROUNDING)
    tokens = held_out(source, rows)
    inputs = {}

    def logits(folder, **settings):  # decoded weights are rounded to bfloat16 here, not in ours
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings).float()
        hook = lambda module, given: inputs.__setitem__(folder, given[0])  # noqa: E731
        model.get_submodule(DOWN).register_forward_pre_hook(hook)
        with torch.no_grad():
            return model(tokens).logits[:, :-1], model.get_submodule(DOWN).weight.detach()

    unpacked = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    dense, weight = logits(source)
    for folder, found, linears in (
        (out, report.outputs.written, report.outputs.linears),
        (tmp_path / "rtn", report.outputs.rounded, report.outputs.rounded_linears),
    ):
        other, rounded = logits(folder, **unpacked)
        p, q = dense.log_softmax(-1), other.log_softmax(-1)
        centred = [each - each.mean(-1, keepdim=True) for each in (dense, other)]
        assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=3e-2)
        assert found.logit_error == pytest.approx(float((centred[1] - centred[0]).norm() / centred[0].norm()), rel=3e-2)
        assert found.same_top_token == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=2e-2)
        assert found.accuracy == pytest.approx(float((q.argmax(-1) == tokens[:, 1:]).float().mean()), abs=2e-2)
        wrong = inputs[source] @ (rounded - weight).T
        assert linears[DOWN] == pytest.approx(float(wrong.norm() / (inputs[source] @ weight.T).norm()), rel=3e-2)


@pytest.mark.parametrize("global_scale", ["amax", "pow2"])
def test_rounding_is_measured_on_the_same_rows_if_they_are_given(source, rows, tmp_path, by_gptq, global_scale):
    report = quantize_checkpoint(str(source), tmp_path / "out", options(rows, "rtn", global_scale=global_scale))
    assert report.outputs.rounded is None
    assert (report.outputs.held_out, report.outputs.sequences) == (True, HELD_OUT)
    same = global_scale == "amax"
    assert (report.outputs.written.kl == pytest.approx(by_gptq[1].outputs.rounded.kl, rel=1e-4)) is same


def test_awq_is_compared_with_the_source_and_its_linears_with_their_rescaled_ones(source, rows, tmp_path):
    report = quantize_checkpoint(str(source), tmp_path / "out", options(rows, "awq"))
    assert report.outputs.written.kl < report.outputs.rounded.kl
    assert all(0 < error < 0.15 for error in report.outputs.linears.values())


def spoiled(groups):
    for tensors in groups:
        for name, tensor in tensors.items():
            if name == f"{DOWN}.weight_packed":
                tensors[name] = tensor ^ 0x88  # every sign
        yield tensors


def test_a_bad_result_of_a_calibration_is_kept_by_another_name(source, rows, tmp_path, monkeypatch):
    whole = compressor.calibrated_groups
    monkeypatch.setattr(compressor, "calibrated_groups", lambda *given: spoiled(whole(*given)))
    for name in ("out-unverified", "out-unverified-2"):
        with pytest.raises(CheckpointError) as caught:
            quantize_checkpoint(str(source), tmp_path / "out", options(rows))
        assert f"the outputs of {DOWN} on 16 x 48 held-out tokens are wrong by 200%" in str(caught.value)
        assert f"kept as {tmp_path / name}" in str(caught.value)
        assert "was removed" not in str(caught.value)
        report = json.loads((tmp_path / name / "quantize_report.json").read_text())
        assert max(report["layers"], key=lambda layer: layer["output_error"])["name"] == DOWN
        assert (tmp_path / name / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-unverified", "out-unverified-2"]


def stop(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_failure_while_measuring_loses_no_calibration(source, rows, tmp_path, monkeypatch, method):
    monkeypatch.setattr(output_error, "measure_outputs", stop)
    with pytest.raises(CheckpointError, match="out of memory"):
        quantize_checkpoint(str(source), tmp_path / "out", options(rows, method))
    assert [path.name for path in tmp_path.iterdir()] == (["out-unverified"] if method == "gptq" else [])


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_model_further_off_than_by_rounding_is_a_warning(by_gptq, caplog, method):
    outputs = by_gptq[1].outputs
    better = replace(outputs.written, kl=outputs.written.kl / 2)
    judge(replace(outputs, rounded=better if method == "gptq" else None), 10)
    assert ("than by rounding to nearest" in caplog.text) is (method == "gptq")


@pytest.mark.parametrize(("error", "bad"), [(0.2, False), (0.4, True), (math.nan, True)])
def test_a_linear_is_bad_if_its_outputs_are_further_off_than_the_limit_and_than_by_rounding(by_gptq, error, bad):
    outputs = replace(by_gptq[1].outputs, linears={DOWN: error})
    for rounded, refused in ((0.1, bad), (0.5, math.isnan(error))):
        with pytest.raises(FailedCheck, match=DOWN) if refused else nullcontext():
            judge(replace(outputs, rounded_linears={DOWN: rounded}), 10)


def test_held_out_rows_are_others_and_do_not_depend_on_the_number_of_the_rest(source, rows):
    tokenizer = load_tokenizer(source)
    small, large = (load_calibration(rows, tokenizer, size, LENGTH, 4) for size in (2, 20))
    assert small.held_out == large.held_out
    assert len(small.held_out) == 4
    assert (len(small.sequences), len(large.sequences)) == (2, 20)
    assert small.held_out
    texts = [tokenizer.decode([token for row in part for token in row]) for part in (large.held_out, large.sequences)]
    asked = [{line for line in text.split("\n") if line.startswith("What is")} for text in texts]
    assert len(asked[0]) > 3
    assert not asked[0] & asked[1]


@pytest.mark.parametrize(("sequences", "held"), [(1, 0), (3, 1), (40, 5)])
def test_of_few_rows_an_eighth_is_held_out(source, tmp_path, sequences, held):
    tokenizer = load_tokenizer(source)
    row = {"text": "What is 3 plus 4? The answer is 7."}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * sequences)
    length = len(tokenizer(row["text"])["input_ids"]) + 1  # with the end token
    found = load_calibration(str(tmp_path / "rows.jsonl"), tokenizer, 256, length, 16)
    assert (len(found.held_out), len(found.sequences)) == (held, sequences - held)
    assert bool(found.held_out) is (held > 0)
    assert found.measured == (found.held_out or found.sequences)
