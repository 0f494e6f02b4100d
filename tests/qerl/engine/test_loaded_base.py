"""A base that is loaded for training alone: its layout, what a sync does, and that it is there once."""

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.checkpoint.experts import FUSED
from qerl.checkpoint.load import load_model
from qerl.engine.loaded_base import LoadedBase
from qerl.engine.options import EngineOptions
from qerl.engine.update import AdapterUpdate, WeightsUpdate, deliver
from qerl.formats.nvfp4.kernel_layout import KernelLinear, adjacent, kernel_linears, place_in_kernel_layout_
from qerl.formats.nvfp4.linear import NVFP4Linear
from tests.helpers.bases import write_base
from tests.helpers.linear_twins import packed_nvfp4
from tests.helpers.roundings import ROUNDING


def linears_of(sizes, scale=64.0):
    torch.manual_seed(0)
    dense = [torch.nn.Linear(64, rows, dtype=torch.bfloat16) for rows in sizes]
    return [packed_nvfp4(linear, torch.tensor([scale])) for linear in dense]


@pytest.mark.parametrize("sizes", [(32, 16, 16), (48,)])
def test_the_layout_of_our_kernels_holds_the_same_weights(sizes):
    """Linears of different scales stay apart."""
    linears = linears_of(sizes)
    placed = kernel_linears(linears)
    assert adjacent(placed)
    for before, after in zip(linears, placed, strict=True):
        assert torch.equal(after.unpack(torch.float32), before.unpack(torch.float32))
        assert torch.equal(after.bias, before.bias)
    placed = kernel_linears([*linears, *linears_of((16,), 128.0)])
    assert not adjacent(placed)
    assert {type(each) for each in placed} == {KernelLinear}


def test_a_cpu_keeps_the_layout_of_the_checkpoint(nvfp4_base):
    assert place_in_kernel_layout_(load_model(nvfp4_base, "nvfp4", dtype="bfloat16"), FUSED) == 0


def test_a_sync_takes_whole_weights_and_leaves_an_adapter_alone(nvfp4_base):
    loaded = LoadedBase(str(nvfp4_base), "nvfp4", EngineOptions())
    assert deliver(AdapterUpdate({"a": torch.ones(1)}, 1.0), loaded) == 1
    name = "model.layers.0.mlp.up_proj"
    linear = loaded.policy_model().get_submodule(name)
    matrix = 0.9 * linear.unpack(torch.float32)
    assert deliver(WeightsUpdate({name: matrix}, {}), loaded) == 1
    assert (linear.unpack(torch.float32) - matrix).norm() < 0.2 * matrix.norm()
    assert not torch.equal(linear.unpack(torch.float32), matrix / 0.9)
    loaded.close()
    with pytest.raises(EngineError, match="load it again"):
        loaded.policy_model()


@pytest.mark.gpu
def test_on_a_card_the_base_is_there_once_and_gives_the_same_logits(tmp_path):
    from qerl.formats.cuda.nvrtc import has_portable_kernels
    from quantize.run import quantize_checkpoint

    base = write_base(tmp_path / "base", hidden=256)
    quantize_checkpoint(str(base), tmp_path / "nvfp4", ROUNDING)
    exact, plain = (load_model(tmp_path / "nvfp4", "nvfp4", dtype=d, device="cuda") for d in ("float32", "bfloat16"))
    model, ids = LoadedBase(str(tmp_path / "nvfp4"), "nvfp4", EngineOptions()).policy_model(), torch.arange(3, 40)
    with torch.no_grad():
        wanted, theirs, ours = (each(input_ids=ids[None].cuda()).logits.float() for each in (exact, plain, model))
    assert 0 < (ours - wanted).norm() < 1.2 * (theirs - wanted).norm()
    placed = [module for module in model.modules() if isinstance(module, NVFP4Linear)]
    assert all(isinstance(each, KernelLinear) == has_portable_kernels(ours.device) for each in placed)
