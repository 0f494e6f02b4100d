"""AWQ and GPTQ through llm-compressor's sequential pipeline: our files hold the same as its own save writes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError, ConfigError
from quantize import compressor as calibrated
from quantize.compressor import check_device, load_compressor
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint, make_tokenizer
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.row_files import write_sums

pytestmark = pytest.mark.usefixtures("one_thread")


def make_salient(folder, channels):
    """Give some channels large activations, as trained models have them; AWQ is made for these."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("layernorm.weight"):
                tensors[name][channels] *= 12
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=[("awq", "qwen2"), ("awq", "qwen3"), ("gptq", "llama")])
def quantized(request, tmp_path_factory):
    """(method, source folder, output folder, report, the calibrated model, its tokens); one layer."""
    method, layout = request.param
    folder = tmp_path_factory.mktemp(f"{method}-{layout}")
    source = make_checkpoint(folder / "model", layout, layers=1)
    make_salient(source, channels=[5, 20, 41])
    seen, original = [], calibrated.calibrate

    def calibrate(source, tokenizer, calibration, *args):
        model = original(source, tokenizer, calibration, *args)
        seen.extend([model, torch.tensor(calibration.sequences)])
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrated, "calibrate", calibrate)
        sizes = {"calibration_size": 4, "sequence_length": 48, "batch_size": 2}
        options = QuantizeOptions(method, calibration=write_sums(folder / "rows.jsonl"), **sizes)
        report = quantize_checkpoint(str(source), folder / "out", options)
    return method, source, folder / "out", report, *seen


def test_the_tensors_equal_those_that_llm_compressor_saves(quantized, tmp_path):
    _, _, out, _, model, _ = quantized
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = load_all(out), load_all(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        # calibration on a CPU is in float32
        expected = theirs[name] if ".weight_" in name else theirs[name].to(torch.bfloat16)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), name


def test_awq_leaves_the_outputs_unchanged_before_rounding(tmp_path):
    """The rescaling cancels: scales go into norms, up_proj and v_proj, their inverses into the layers after them."""
    from qerl.checkpoint.load import load_tokenizer
    from qerl.checkpoint.source import read_source
    from quantize.calibration import load_calibration

    folder = make_checkpoint(tmp_path / "model", "qwen2", layers=1, dtype="float32")
    source = read_source(str(folder))
    rows = load_calibration(write_sums(tmp_path / "rows.jsonl"), load_tokenizer(folder), 2, 48)
    scaled = calibrated.calibrate(source, make_tokenizer(), rows, QuantizeOptions("awq"))
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = [name for name, _ in twin.named_parameters()]
    weights = {name: calibrated.dense_tensor(source, scaled, name) for name in names}
    changed = [name for name in names if not torch.equal(weights[name], twin.get_parameter(name))]
    assert len(changed) >= 7
    tokens = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        before = twin(tokens).logits
        twin.load_state_dict(weights)
        torch.testing.assert_close(twin(tokens).logits, before, rtol=1e-4, atol=1e-4)


def test_the_report_names_the_data_and_the_reference_of_the_sqnr(quantized):
    method, _, out, report, _, _ = quantized
    saved = json.loads((out / "quantize_report.json").read_text())
    assert saved["calibration"]["sequences"] == 4
    assert saved["calibration"]["tokens"] == 4 * 48
    assert saved["sqnr_reference"] == ("the source after AWQ's rescaling" if method == "awq" else "the source")
    assert len(report.layers) == 7
    if method == "awq":
        assert all(19 < layer.sqnr_db < 22 for layer in report.layers)


def test_ignored_layers_are_not_touched_by_gptq(tmp_path):
    source = make_checkpoint(tmp_path / "model", "llama", layers=1)
    rows, ignore = write_sums(tmp_path / "rows.jsonl"), ("re:.*self_attn.*",)
    options = QuantizeOptions("gptq", ignore=ignore, calibration=rows, calibration_size=2, sequence_length=32)
    quantize_checkpoint(str(source), tmp_path / "out", options)
    before, after = load_all(source), load_all(tmp_path / "out")
    assert {name for name in before if name in after} == {name for name in before if ".mlp." not in name}
    assert all(torch.equal(after[name], before[name]) for name in before if name in after)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="on a CPU only")
def test_a_missing_card_is_not_warned_of(tmp_path, capfd, caplog):
    source, rows = make_checkpoint(tmp_path / "model", "qwen2", layers=1), write_sums(tmp_path / "rows.jsonl")
    options = QuantizeOptions("awq", calibration=rows, calibration_size=2, sequence_length=32)
    quantize_checkpoint(str(source), tmp_path / "out", options)
    assert "No accelerator" not in capfd.readouterr().err + caplog.text


def test_a_device_that_llm_compressor_does_not_use_is_refused():
    check_device(torch.device("cpu"))
    with pytest.raises(ConfigError, match="--device meta cannot be used with awq and gptq"):
        check_device(torch.device("meta"))


def test_a_model_that_transformers_cannot_load_gives_one_clear_error(tmp_path):
    source = make_checkpoint(tmp_path / "model", "llama", layers=1)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    options = QuantizeOptions("gptq", calibration=write_sums(tmp_path / "r.jsonl"), sequence_length=32)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*unheard_of"):
        quantize_checkpoint(str(source), tmp_path / "out", options)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="llm-compressor fails only without an accelerator")
def test_the_workaround_for_pinned_memory_is_still_needed(tmp_path):
    """When this fails, `UnpinnedAWQModifier` in quantize/compressor.py can go."""
    load_compressor()
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier

    source = make_checkpoint(tmp_path / "model", "llama", layers=1)
    rows = [{"input_ids": torch.arange(16), "attention_mask": torch.ones(16, dtype=torch.long)}]
    rounding = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
    loader, recipe = torch.utils.data.DataLoader(rows), [AWQModifier(), rounding]
    with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA driver"):
        oneshot(model=str(source), tokenizer=str(source), recipe=recipe, dataset=loader, pipeline="sequential")


@pytest.mark.parametrize(
    ("method", "observer", "data"),
    [("rtn", "memoryless_mse", "none"), ("rtn", "imatrix_mse", None), ("gptq", "imatrix_mse", None)],
)
def test_its_observers_can_be_chosen(tmp_path, method, observer, data):
    source = make_checkpoint(tmp_path / "model", "llama", layers=1)
    rows = write_sums(tmp_path / "rows.jsonl")
    sizes = {} if data else {"calibration_size": 4, "sequence_length": 48}
    asked = {"calibration": data or rows, "start_rank": 0, **sizes}
    for name in (observer, "memoryless_minmax"):
        quantize_checkpoint(str(source), tmp_path / name, QuantizeOptions(method, observer=name, **asked))
    ours, usual = load_all(tmp_path / observer), load_all(tmp_path / "memoryless_minmax")
    differing = {name for name in ours if not torch.equal(ours[name].view(torch.uint8), usual[name].view(torch.uint8))}
    assert any(name.endswith("weight_scale") for name in differing)
