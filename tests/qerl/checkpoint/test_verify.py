"""The check of a written checkpoint finds each kind of damage: a check that cannot fail would prove nothing."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.base.errors import CheckpointError
from qerl.checkpoint.shards import TensorReader
from qerl.checkpoint.source import read_source
from qerl.checkpoint.verify import sqnr_db, verify
from qerl.formats import NVFP4
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.roundings import ROUNDING

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    source = make_checkpoint(folder / "model", "qwen2", layers=1)
    quantize_checkpoint(str(source), folder / "out", ROUNDING)
    return read_source(str(source)), folder / "out"


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made[1], tmp_path / "copy")


def run(source, folder, change=lambda tensors: None, advance=lambda: None):
    """Change the tensors in `folder` by a function, then verify it."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with TensorReader(source.tensors) as dense:
        return verify(folder, source, dense, torch.device("cpu"), advance)


def test_a_good_checkpoint_passes_and_every_linear_has_an_sqnr(made, copy):
    source, steps = made[0], []
    checks = run(source, copy, advance=lambda: steps.append(1))
    assert [layer.name for layer in checks] == list(source.quantized)
    assert [layer.shape for layer in checks] == [source.tensors[f"{name}.weight"].shape for name in source.quantized]
    assert all(19 < layer.sqnr_db < 22 for layer in checks)
    assert len(steps) == len(source.tensors)


def at(name, change):
    """A change of one tensor."""
    return lambda tensors: tensors.update({name: change(tensors[name])})


def times(factor):
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def flipped(tensor):
    """With another lowest bit."""
    tensor.view(torch.uint8).view(-1)[0] ^= 1
    return tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}.weight_scale"), rf"{DOWN}\.weight_scale is missing"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.pop(f"{Q}.bias"), r"q_proj\.bias is missing"),
        (lambda t: t.update({f"{DOWN}.input_global_scale": torch.ones(1)}), r"input_global_scale is unexpected"),
        (lambda t: t.update({f"{DOWN}.weight": torch.ones(64, 112)}), r"down_proj\.weight is unexpected"),
        (at(f"{DOWN}.weight_scale", torch.Tensor.float), r"weight_scale is F32 \(64, 7\), not F8_E4M3 \(64, 7\)"),
        (at(f"{DOWN}.weight_packed", lambda p: p[:, 8:].clone()), r"packed is U8 \(64, 48\), not U8 \(64, 56\)"),
        (at("lm_head.weight", torch.Tensor.float), r"lm_head\.weight is F32"),
        (at(f"{DOWN}.weight_global_scale", torch.reciprocal), rf"{DOWN} has an SQNR of -"),
        (at(f"{DOWN}.weight_packed", lambda p: (p << 4) | (p >> 4)), rf"{DOWN} has an SQNR of"),
        (at(f"{DOWN}.weight_global_scale", times(2)), rf"{DOWN} has an SQNR of 5\.9 dB, less than 10"),
        (at(f"{Q}.weight_global_scale", times(1.01)), "q_proj.weight_global_scale is not that of"),
        (at(f"{DOWN}.weight_global_scale", times(0)), r"is 0\.0, must be finite and positive"),
        (at(f"{DOWN}.weight_scale", lambda s: torch.full_like(s, math.nan)), "block scales are NaN"),
        (at("model.embed_tokens.weight", flipped), r"model\.embed_tokens\.weight is not the tensor"),
        (at(f"{K}.bias", flipped), r"k_proj\.bias is not the tensor"),
        (at("model.layers.0.input_layernorm.weight", flipped), r"input_layernorm\.weight is not the tensor"),
    ],
)
def test_damaged_tensors_are_found(made, copy, change, message):
    with pytest.raises(CheckpointError, match=f"does not pass its check.*{message}"):
        run(made[0], copy, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config["quantization_config"].clear(), "already quantized as None"),
        (lambda config: config["quantization_config"].update(ignore=["lm_head", DOWN]), "config.json ignores"),
        (lambda config: config["quantization_config"].update(ignore=[]), "config.json ignores"),
        (lambda config: config["quantization_config"].update(format="pack-quantized"), "pack-quantized"),
        (lambda config: config.pop("quantization_config"), "does not say that it is NVFP4"),
    ],
)
def test_a_wrong_config_is_found(made, copy, change, message):
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        run(made[0], copy)


def test_a_failed_check_publishes_nothing(made, tmp_path, monkeypatch):
    strict = replace(made[0], format=replace(NVFP4, min_sqnr_db=60.0))
    monkeypatch.setattr("quantize.run.read_source", lambda *arguments, **more: strict)
    with pytest.raises(CheckpointError, match=r"does not pass its check and was removed: .*less than 60"):
        quantize_checkpoint(str(made[0].folder), tmp_path / "out", ROUNDING)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("weight", "decoded", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.5], 20.0),  # |w| = 5, |w - w_hat| = 0.5
        ([3.0, 4.0], [-6.0, -8.0], 20 * math.log10(1 / 3)),
        ([3.0, 4.0], [3.0, 4.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], None),
        ([0.0, 0.0], [0.0, 1.0], -math.inf),
    ],
)
def test_sqnr_equals_values_computed_by_hand(weight, decoded, expected):
    value = sqnr_db(torch.tensor(weight), torch.tensor(decoded))
    assert value == (expected if expected is None else pytest.approx(expected, abs=1e-6))
