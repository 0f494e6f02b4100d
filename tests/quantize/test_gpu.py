"""Quantization on a CUDA device gives almost the CPU's bits, and holds only a small part of the model there.

Last run on an H200, 2026-11-22, before outputs were measured; the measurement alone agreed with the CPU's there.
"""

import pytest
import torch

from quantize.options import QuantizeOptions
from quantize.run import quantize_checkpoint
from tests.helpers.checkpoint_factory import make_checkpoint
from tests.helpers.checkpoint_tensors import load_all
from tests.helpers.row_files import write_sums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LARGER = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 8}


@pytest.mark.parametrize("layout", ["qwen2", "qwen3"])
def test_rounding_on_the_device_gives_almost_the_same_codes_as_on_the_cpu(tmp_path, layout):
    source = make_checkpoint(tmp_path / "model", layout, **LARGER)
    reports = [
        quantize_checkpoint(str(source), tmp_path / device, QuantizeOptions(device=device, method="rtn"))
        for device in ("cpu", "cuda")
    ]
    ours, theirs = load_all(tmp_path / "cuda"), load_all(tmp_path / "cpu")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        same = (tensor.view(torch.uint8) == theirs[name].view(torch.uint8)).float().mean()
        assert same > (0.999 if ".weight_" in name else 0.9999999), name  # CUDA divides by 6 by multiplying with 1/6
    for cpu, cuda in zip(reports[0].layers, reports[1].layers, strict=True):
        assert cuda.sqnr_db == pytest.approx(cpu.sqnr_db, abs=0.05)


def test_only_one_layer_at_a_time_is_on_the_device(tmp_path):
    source = make_checkpoint(tmp_path / "model", "llama", layers=16, **LARGER)
    alone = QuantizeOptions(method="rtn", start_rank=0)
    quantize_checkpoint(str(source), tmp_path / "warm", alone)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = quantize_checkpoint(str(source), tmp_path / "out", alone)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < report.bytes_before  # of all 16 layers; one layer with its float copies is about half of that


@pytest.mark.parametrize(("method", "layout"), [("awq", "qwen2"), ("gptq", "qwen3"), ("awq", "llama")])
def test_calibrated_methods_run_and_verify(tmp_path, method, layout):
    source = make_checkpoint(tmp_path / "model", layout, **LARGER)
    rows = write_sums(tmp_path / "rows.jsonl", 400)
    report = quantize_checkpoint(
        str(source),
        tmp_path / "out",
        QuantizeOptions(method=method, calibration=rows, calibration_size=8, sequence_length=128, batch_size=4),
    )
    assert len(report.layers) == 14
    assert report.outputs.held_out
    assert 0 < report.outputs.written.kl < report.outputs.rounded.kl
    before, after = load_all(source), load_all(tmp_path / "out")
    changed = {name for name in before if name in after and not torch.equal(before[name], after[name])}
    assert all(name.endswith(("layernorm.weight", "v_proj.bias")) for name in changed)
    assert bool(changed) == (method == "awq")
