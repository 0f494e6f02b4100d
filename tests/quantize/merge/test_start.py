"""Whole models of adapters that were trained with a start of their base, against weights that are computed here."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.base.errors import CheckpointError
from qerl.checkpoint.base_start import LORA_A, LORA_B, START
from qerl.checkpoint.experts import fused
from qerl.formats.nvfp4.reference import quantize, shared_global_scale
from tests.helpers.checkpoint_tensors import load_all, tensors_in
from tests.helpers.started import (
    RANK,
    SCALING,
    assert_rounded_once,
    by_hand,
    factors_of,
    make_adapter,
    merged,
    name_start,
)
from tests.helpers.starts import give_start_

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("onto", ["trained", "original"])
def test_16_bits_hold_the_policy_or_the_change_on_the_original(bases, made, tmp_path, onto):
    report = merged(made.folder, "bf16", tmp_path / "out", onto=onto)
    assert_rounded_once(load_all(report.out), by_hand(bases, made.folder, made.kind, onto))
    assert report.survival.kept == pytest.approx(1.0, abs=0.01)
    assert (report.start is None) == (made.kind == "none")
    assert not (report.out / START).exists()


@pytest.mark.parametrize("onto", ["trained", "original"])
def test_4_bits_are_those_of_the_weights_by_hand(bases, made, tmp_path, onto):
    """Float32 sums may differ from these in the last bit, which moves the global scale, but no code here."""
    report = merged(made.folder, "nvfp4", tmp_path / "out", onto=onto)
    written, exact = tensors_in(report.out), by_hand(bases, made.folder, made.kind, onto)
    assert len(exact) == 14
    for modules in fused(exact):
        expected = shared_global_scale([exact[name].float() for name in modules])
        for name in modules:
            scale = written[f"{name}.weight_global_scale"]
            torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)
            packed = quantize(exact[name].float(), scale)
            assert torch.equal(written[f"{name}.weight_packed"], packed.packed), name
            assert torch.equal(written[f"{name}.weight_scale"].float(), packed.block_scale.float()), name
    said = [warning for warning in report.warnings() if "has no start that repairs it" in warning]
    assert len(said) == (made.kind != "none")
    assert all(f"qerl merge --adapter {made.folder} --to bf16" in warning for warning in said)


@pytest.mark.parametrize(("to", "onto"), [("bf16", "trained"), ("nvfp4", "original")])
def test_one_adapter_of_both_is_merged_like_the_two(bases, frozen, tmp_path, to, onto):
    one = merged(frozen, "adapter", tmp_path / "one", with_start=True).out
    ours, theirs = (
        load_all(merged(each, to, tmp_path / f"{each.parent.name}-{to}", onto=onto).out) for each in (one, frozen)
    )
    assert ours.keys() == theirs.keys()
    same = [torch.equal(tensor.float(), theirs[name].float()) for name, tensor in ours.items()]
    assert sum(same) >= len(same) - 4  # a last bit of a float32 sum


def test_what_was_trained_from_a_start_repairs_its_own_linears_alone(bases, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", bases, "trained", targets=("q_proj", "up_proj"))
    report = merged(adapter, "bf16", tmp_path / "out")
    assert_rounded_once(load_all(report.out), by_hand(bases, adapter, "trained", "trained"))


def test_nothing_that_was_not_trained_is_measured_as_an_effect(bases, tmp_path):
    for kind in ("frozen", "trained"):
        adapter = make_adapter(tmp_path / kind, bases, kind)
        tensors, start = load_file(adapter / "adapter_model.safetensors"), factors_of(bases)
        for name, tensor in tensors.items():
            own = start[name.removeprefix("base_model.model.")].float()
            if name.endswith(LORA_B):
                tensor.zero_()
            if kind == "trained":
                (tensor[:RANK] if name.endswith(LORA_A) else tensor[:, :RANK]).copy_(
                    own if name.endswith(LORA_A) else own / SCALING
                )
        save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
        report = merged(adapter, "bf16", tmp_path / f"{kind}-out", prompt_count=2, max_new_tokens=8)
        assert report.effect.kl_base < 1e-9
        assert report.effect.kept is None
        assert report.effect.kl_merged < 1e-4
        assert report.survival.kept is None


def test_the_effect_is_measured_from_the_start(bases, made, tmp_path):
    report = merged(made.folder, "bf16", tmp_path / "out", prompt_count=4, max_new_tokens=16)
    assert report.effect.kl_base > 1e-3
    assert report.effect.kept > 0.99


def test_a_start_of_other_components_and_a_changed_base_are_refused(bases, frozen, trained, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(bases.nvfp4, folder)
    give_start_(folder, bases.source, rank=12)
    factors = {name: tensor + 0.5 for name, tensor in factors_of(bases).items()}
    for adapter in (frozen, trained):
        other = shutil.copytree(adapter, tmp_path / adapter.parent.name / "adapter")
        name_start(other, folder, "frozen" if adapter is frozen else "trained", factors)
        for options in ({"to": "bf16"}, {"to": "nvfp4"}, {"to": "adapter"}):
            with pytest.raises(CheckpointError, match=r"trained with a start of rank 24 .* that is not here"):
                merged(other, out=tmp_path / "out", **options)
    shutil.copytree(bases.nvfp4 / START, folder / START, dirs_exist_ok=True)
    path = next(folder.glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="was made for other weights than"):
        merged(frozen, "bf16", tmp_path / "out", model=str(folder))
    assert not (tmp_path / "out").exists()


def test_a_frozen_start_does_not_act_on_the_original(bases, frozen, tmp_path):
    report = merged(frozen, "bf16", tmp_path / "out", model=str(bases.source))
    assert_rounded_once(load_all(report.out), by_hand(bases, frozen, "frozen", "original"))
