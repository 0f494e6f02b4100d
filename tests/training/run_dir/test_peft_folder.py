"""The adapter of a run opens in plain PEFT: the lines of its README.md run as they stand."""

import json
import re
import shutil

import pytest
import torch
from small_run import small_config

import qerl.checkpoint.resolve
from qerl.checkpoint.peft_folder import TrainedOn, card_text, plain_base
from qerl.checkpoint.quantized_folder import REPORT
from qerl.checkpoint.resolve import resolve_model
from qerl.errors import CheckpointError
from training.run import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(nvfp4_base, tmp_path_factory):
    """A folder with a finished run `runs/mine`."""
    folder = tmp_path_factory.mktemp("peft")
    start(small_config(nvfp4_base, folder, "noise.enabled=false", steps=1, out="runs/mine"), "tiny")
    return folder


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_lines_of_the_card_run_as_they_stand(folder, base, nvfp4_base, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    card = (folder / "runs/mine/adapter/README.md").read_text(encoding="utf-8")
    plain, exact = blocks(card)
    assert "AutoPeftModelForCausalLM" in plain
    models = []
    for block in (plain, exact):
        names = {}
        exec(compile(block, "README.md", "exec"), names)
        models.append(names["model"])
        assert capsys.readouterr().out
        assert len(names["tokenizer"]) > 600
    weights = [model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").base_layer.weight for model in models]
    assert not torch.equal(*weights)
    assert weights[0].dtype == weights[1].dtype == torch.bfloat16
    assert str(base) in card
    assert str(nvfp4_base) in card


def test_peft_is_named_the_16_bit_model_and_qerl_takes_the_base_that_was_trained_on(folder, base, nvfp4_base):
    adapter = folder / "runs/mine/adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    found = resolve_model(str(adapter))
    assert (found.kind, found.base, found.format) == ("adapter", str(nvfp4_base), "nvfp4")
    assert resolve_model(str(folder / "runs/mine")).base == str(nvfp4_base)
    assert resume(folder / "runs/mine").adapter == adapter


def test_where_the_base_is_not_here_its_16_bit_model_is_asked_for_in_its_format(folder, base, tmp_path, monkeypatch):
    adapter = shutil.copytree(folder / "runs/mine/adapter", tmp_path / "adapter")
    text = json.dumps({"base": "checkpoints/gone-NVFP4A16", "format": "nvfp4"})
    (adapter / "trained_on.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"run `qerl quantize --model {base}` first"):
        resolve_model(str(adapter))
    (adapter / "trained_on.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"trained_on\.json names no base and format: write `--model BASE"):
        resolve_model(str(adapter))


def test_an_adapter_without_trained_on_resolves_as_before(folder, nvfp4_base, tmp_path):
    adapter = shutil.copytree(folder / "runs/mine/checkpoints/step-000001", tmp_path / "adapter")
    assert not (adapter / "trained_on.json").exists()
    assert resolve_model(str(adapter)).base == str(nvfp4_base)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda report: report | {"method": "awq"}, "was rescaled when it was quantized"),
        (lambda report: {}, "is not known: the folder of the base does not name it"),
    ],
)
def test_a_card_says_why_it_names_no_16_bit_model(nvfp4_base, tmp_path, change, said):
    other = shutil.copytree(nvfp4_base, tmp_path / "other")
    (other / REPORT).write_text(json.dumps(change(json.loads((other / REPORT).read_text()))))
    origin = TrainedOn(str(other), "nvfp4")
    assert plain_base(origin) is None
    card = card_text("runs/x/adapter", origin)
    assert said in card
    (block,) = blocks(card)
    assert "CompressedTensorsConfig(dequantize=True)" in block


def test_the_embedded_model_is_named_by_its_folder(tmp_path):
    (tmp_path / REPORT).write_text('{"source": "tiny"}')
    assert plain_base(TrainedOn(str(tmp_path), "nvfp4")) == str(qerl.checkpoint.resolve.TINY_FOLDER)
