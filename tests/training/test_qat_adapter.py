"""Runs that train an adapter through the quantizer, on the transformers engine. One run of three steps is shared."""

import json
import shutil

import pytest
import torch

import training.run
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.adapter import A_SUFFIX, B_SUFFIX
from qerl.checkpoint.adapter_file import read_adapter
from qerl.checkpoint.resolve import resolve_model
from qerl.formats.nvfp4 import reference
from quantize.export.options import ExportOptions
from quantize.export.run import export
from tests.helpers.checkpoint_tensors import same_tensors, tensors_in
from tests.helpers.small_run import numbers, same_adapters, small_config
from training.run import resume, start

QAT = ("qat.mode=adapter", "adapter.train_norms=true", "loss.kl_coef=0.05", "optim.learning_rate=1e-3")
QAT += ("run.save_every=1", "run.keep_checkpoints=9")
LINEARS = 14
PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


def config_of(base, folder, *overrides, steps=3):
    return small_config(base, folder, *QAT, *overrides, steps=steps)


def sums(adapter, start):
    """W0 + s B A of each linear by the definition, float32, from the tensors of a 16-bit model."""
    tensors, scaling = read_adapter(adapter)
    names = [name.removesuffix(A_SUFFIX) for name in tensors if name.endswith(A_SUFFIX)]
    factors = {name: (tensors[name + B_SUFFIX].double(), tensors[name + A_SUFFIX].double()) for name in names}
    return {name: (start[f"{name}.weight"].double() + scaling * (b @ a)).float() for name, (b, a) in factors.items()}


def packed(weights, base):
    """The reference's bytes of each weight under the global scales of a packed model's tensors."""
    found = {name: reference.quantize(w, base[f"{name}.{PARTS[2]}"]).named() for name, w in weights.items()}
    return {f"{name}.{part}": tensor.view(torch.uint8) for name, own in found.items() for part, tensor in own.items()}


@pytest.fixture(scope="module")
def ran(base, tmp_path_factory):
    """(the finished run, the model that its engine held in the end, where its codes lay at the beginning)."""
    torch.set_num_threads(1)
    opened, places = [], {}
    with pytest.MonkeyPatch.context() as patch:
        original = training.run.open_rollout_engine

        def watched(*given):
            engine = original(*given)
            opened.append(engine.policy_model())
            places.update({name: buffer.data_ptr() for name, buffer in opened[0].named_buffers()})
            return engine

        patch.setattr(training.run, "open_rollout_engine", watched)
        run = start(config_of(base, tmp_path_factory.mktemp("qat")), "qat").run_dir
    return run, opened[0], places


def test_the_engine_holds_the_reference_s_bytes_of_base_and_adapter_in_place(ran, base):
    """The last rollout sampled from the adapter after the step before the last; its KL term put that back."""
    run, model, places = ran
    held = {name.replace(".base_layer", ""): tensor for name, tensor in model.named_buffers() if name.endswith(PARTS)}
    expected = packed(sums(run / "checkpoints/step-000002", tensors_in(base)), tensors_in(run / "base"))
    assert len(expected) == 3 * LINEARS
    assert all(torch.equal(held[name].view(torch.uint8), tensor) for name, tensor in expected.items())
    begun = tensors_in(run / "base")
    assert any(not torch.equal(begun[name].view(torch.uint8), tensor) for name, tensor in expected.items())
    now = {name.replace(".base_layer", ""): buffer.data_ptr() for name, buffer in model.named_buffers()}
    assert all(now[name] == place for name, place in places.items() if name.endswith(PARTS))


def test_the_reference_is_the_packed_base_and_the_policies_agree(ran):
    rows = numbers(ran[0])
    assert rows[0]["kl"] == 0 < rows[2]["kl"]
    assert rows[0]["mismatch_kl"] < 1e-6  # without noise, which begins with the second step


def test_model_export_and_merge_have_the_same_bytes(ran, base, tmp_path):
    run = ran[0]
    model, adapter = tensors_in(run / "model"), read_adapter(run / "adapter")[0]
    assert same_adapters(run / "adapter", run / "checkpoints/step-000003")
    for name, tensor in packed(sums(run / "adapter", tensors_in(base)), tensors_in(run / "base")).items():
        assert torch.equal(model[name].view(torch.uint8), tensor), name
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(model[norm], adapter[norm].to(model[norm].dtype))
    assert same_tensors(export(ExportOptions(str(run), out=tmp_path / "exported")).out, run / "model")
    for place in (run, run / "adapter"):
        merged = export(ExportOptions(str(place), "nvfp4", tmp_path / "merged", overwrite=True))
        assert same_tensors(merged.out, run / "model")
        assert merged.step == 3
    early = export(ExportOptions(str(run / "checkpoints/step-000001"), "nvfp4", tmp_path / "early"))
    assert early.step == 1
    assert not same_tensors(early.out, run / "model")


def test_in_16_bits_the_sum_is_rounded_once(ran, base, tmp_path):
    report = export(ExportOptions(str(ran[0]), "bf16", tmp_path / "wide"))
    found = tensors_in(report.out)
    for name, weight in sums(ran[0] / "adapter", tensors_in(base)).items():
        assert torch.equal(found[f"{name}.weight"], weight.bfloat16())
    card = (report.out / "README.md").read_text()
    assert "the 16-bit weights with the adapter rounded to bfloat16, which is not the model" in card


def test_the_adapter_s_folder_names_the_16_bit_model(ran, base, tmp_path):
    run = ran[0]
    named = json.loads((run / "adapter/trained_on.json").read_text())
    assert named == {"base": str(base), "format": "bf16", "start": None}
    assert "through the quantizer" in (run / "adapter/README.md").read_text()
    of_run, alone = resolve_model(str(run)), resolve_model(str(run / "adapter"))
    assert (of_run.base, of_run.adapter, of_run.format) == (str(run / "model"), None, "nvfp4")
    assert (alone.base, alone.adapter, alone.format) == (str(base), run / "adapter", "bf16")
    export(ExportOptions(str(run), "adapter", tmp_path / "peft"))
    assert same_adapters(tmp_path / "peft", run / "adapter")


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(ran, tmp_path):
    whole = ran[0]
    run = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("base"))  # which is made again
    resume(run, step=2)
    assert numbers(run) == numbers(whole)
    for name in ("adapter_model.safetensors", "optimizer.pt", "../../model/model.safetensors"):
        assert (run / "checkpoints/step-000003" / name).read_bytes() == (
            whole / "checkpoints/step-000003" / name
        ).read_bytes()


def test_linears_that_stay_in_16_bits_have_the_sum_rounded_to_their_dtype(base, tmp_path):
    """Layers that are not quantized are adapted all the same, and a base in float32 loses nothing."""
    given = ("qat.quant_cfg=nvfp4_w4a16_ffn", "adapter.train_norms=false", "loss.kl_coef=0", "noise.enabled=false")
    run = start(config_of(base, tmp_path, *given, steps=1), "qat").run_dir
    model, name = tensors_in(run / "model"), "model.layers.0.self_attn.q_proj"
    expected = sums(run / "adapter", tensors_in(base))[name]
    assert torch.equal(model[f"{name}.weight"], expected.to(model[f"{name}.weight"].dtype))
    assert sum(part.endswith("weight_packed") for part in model) == 6


def test_what_is_refused_is_refused_in_one_line(ran, nvfp4_base, tmp_path):
    with pytest.raises(ConfigError, match=r"already quantized \(NVFP4\), and qat trains a 16-bit model: give "):
        start(config_of(nvfp4_base, tmp_path), "qat")
    with pytest.raises(ConfigError, match=r"--onto trained: .* within the packed weights .*leave --onto out$"):
        export(ExportOptions(str(ran[0]), "nvfp4", tmp_path / "out", onto="trained"))
    run = tmp_path / "copy"
    shutil.copytree(ran[0], run)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "weights": "0" * 16}))
    with pytest.raises(CheckpointError, match=r"holds other weights than when .* take .*/model, which"):
        export(ExportOptions(str(run), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
