"""`--global-scale pow2`: every method writes the reference's powers of two, in a standard file."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.checkpoint.experts import fused
from qerl.formats.nvfp4 import reference
from quantize.export.options import ExportOptions
from quantize.export.run import export
from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.merged import random_adapter
from tests.helpers.roundings import rounding
from tests.helpers.row_files import write_sums

POW2 = rounding(global_scale="pow2")

pytestmark = pytest.mark.usefixtures("one_thread")


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
