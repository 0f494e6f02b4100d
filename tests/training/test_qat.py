"""Runs that train whole weights through the quantizer, on the transformers engine."""

import shutil

import pytest
import torch

import training.run
from qerl.base.errors import ConfigError
from qerl.checkpoint.load import load_model
from qerl.checkpoint.shards import read_json
from qerl.formats.nvfp4 import reference
from tests.helpers.checkpoint_tensors import tensors_in
from tests.helpers.small_run import numbers, small_config
from tests.helpers.validated_run import validated_config
from training.run import resume, start
from training.run_dir.log import read_metrics

QAT = ("qat.mode=weights", "run.save_every=1", "run.keep_checkpoints=9", "noise.enabled=false")
QAT += ("optim.learning_rate=1e-3",)
EVERY = 14  # linears of the base


def config_of(base, folder, *overrides, steps=3, out="run"):
    return small_config(base, folder, *QAT, *overrides, steps=steps, out=out)


def packed_of(master, scale):
    """The reference's bytes of a master, by tensor."""
    named = reference.quantize(master, scale).named()
    return {name: tensor.view(torch.uint8) for name, tensor in named.items()}


@pytest.fixture(scope="module")
def ran(base, tmp_path_factory):
    """(the finished run, the model that its engine held in the end)."""
    torch.set_num_threads(1)
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        original = training.run.open_rollout_engine

        def watched(*given):
            engine = original(*given)
            opened.append(engine.policy_model())
            return engine

        patch.setattr(training.run, "open_rollout_engine", watched)
        run = start(config_of(base, tmp_path_factory.mktemp("qat")), "qat").run_dir
    return run, opened[0]


def test_the_engine_holds_the_reference_s_bytes_of_every_master(ran):
    """The last rollout sampled from the masters after the step before the last."""
    run, model = ran
    masters = tensors_in(run / "checkpoints/step-000002/weights")
    assert len(masters) == EVERY
    for name, master in masters.items():
        linear = model.get_submodule(name.removesuffix(".weight"))
        expected = packed_of(master, linear.weight_global_scale)
        for part, tensor in expected.items():
            assert torch.equal(getattr(linear, part).view(torch.uint8), tensor), name


def test_the_base_has_the_bytes_of_unchanged_masters_and_scales_with_room(ran, base):
    run, _ = ran
    begun, dense = tensors_in(run / "base"), tensors_in(base)
    for name in tensors_in(run / "checkpoints/step-000001/weights"):
        module = name.removesuffix(".weight")
        scale = begun[f"{module}.weight_global_scale"]
        for part, tensor in packed_of(dense[name].float(), scale).items():
            assert torch.equal(begun[f"{module}.{part}"].view(torch.uint8), tensor), name
        assert reference.faults(3.9 * dense[name].float(), scale)[1] == 0
    queries, keys = (begun[f"model.layers.0.self_attn.{name}_proj.weight_global_scale"] for name in "qk")
    assert torch.equal(queries, keys)


def test_the_result_is_the_last_masters_packed(ran):
    run, _ = ran
    masters, begun, model = (tensors_in(run / name) for name in ("checkpoints/step-000003/weights", "base", "model"))
    assert set(model) == set(begun)
    for name, tensor in model.items():
        module, _, part = name.rpartition(".")
        if f"{module}.weight" in masters:
            expected = packed_of(masters[f"{module}.weight"], begun[f"{module}.weight_global_scale"])[part]
            assert torch.equal(tensor.view(torch.uint8), expected), name
        else:
            assert torch.equal(tensor, begun[name])
    assert any(not torch.equal(model[name], begun[name]) for name in model if name.endswith("packed"))
    assert read_json(run / "model" / "config.json")["quantization_config"]["format"] == "nvfp4-pack-quantized"
    load_model(run / "model", "nvfp4")


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(ran, tmp_path):
    whole, _ = ran
    run = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("base"))  # which is made again
    resume(run, step=2)
    assert numbers(run) == numbers(whole)
    saved = ("weights/model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt")
    for name in (*(f"checkpoints/step-000003/{each}" for each in saved), "model/model.safetensors"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize(
    ("overrides", "trained", "packed"),
    [
        (("qat.targets=['re:.*layers.1.*(q|down)_proj']",), "layers.1.", 14),
        ((r"qat.quant_cfg.ignore=['re:model\.layers\.0\.', lm_head]", "qat.train_norms=true"), "", 7),
    ],
    ids=["targets", "norms"],
)
def test_a_part_of_the_linears_is_trained(base, tmp_path, overrides, trained, packed):
    run = start(config_of(base, tmp_path, *overrides, "run.seed=3", steps=1), "qat").run_dir
    found = tensors_in(run / "model")
    assert sum(name.endswith("weight_packed") for name in found) == packed
    masters, begun = tensors_in(run / "checkpoints/step-000001/weights"), tensors_in(run / "base")
    changed = [name for name in found if not torch.equal(begun[name], found[name])]
    assert changed
    assert all(trained in name for name in changed)
    norms = {name: tensor for name, tensor in masters.items() if "norm" in name}
    assert len(norms) == (4 if "qat.train_norms=true" in overrides else 0)
    assert all(not torch.equal(tensor, begun[name].float()) for name, tensor in norms.items())
    assert all(trained in name and ".layers." in name for name in masters)


@pytest.mark.parametrize(
    ("given", "overrides", "message"),
    [
        ("nvfp4_base", (), r"already quantized \(NVFP4\), and qat trains a 16-bit model: give "),
        ("base", ("qat.targets=['re:.*gate']", "qat.quant_cfg.ignore=['re:nothing']"), "'re:nothing' matches no layer"),
        ("base", ("qat.targets=[q_proj]",), r"qat\.targets 'q_proj' matches no layer: write a full name"),
        ("base", ("qat.quant_cfg.ignore=['re:.*layers.*']",), "keeps all 2 decoder layers in 16 bits"),
        ("base", ("qat.quant_cfg.ignore=['re:.*q_proj']",), r"quant_cfg\.ignore keeps .*q_proj in 16 bits but not"),
    ],
    ids=["4 bits", "ignore", "targets", "all kept", "split"],
)
def test_what_cannot_be_trained_is_refused_and_nothing_is_written(given, overrides, message, request, tmp_path):
    model = request.getfixturevalue(given)
    with pytest.raises(ConfigError, match=message) as refused:
        start(config_of(model, tmp_path, *overrides), "qat")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("[!.]*"))


def test_a_folder_that_a_kill_left_before_the_run_began_is_taken_again(base, tmp_path, monkeypatch):
    monkeypatch.setattr(training.run, "open_rollout_engine", lambda *_: pytest.fail("stopped here"))
    with pytest.raises(pytest.fail.Exception):
        start(config_of(base, tmp_path), "qat")
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["base"]
    monkeypatch.undo()
    assert start(config_of(base, tmp_path, steps=1), "qat").steps == 1


def test_the_best_validation_keeps_its_checkpoint_and_names_the_export(base, tmp_path, caplog):
    more = ("validation.every=1", "run.keep_checkpoints=1", "optim.learning_rate=3e-2")
    with caplog.at_level("INFO"):
        run = start(validated_config(base, tmp_path, *QAT, *more, steps=2), "qat").run_dir
    values = {row["step"]: row["validation/reward"] for row in read_metrics(run) if "validation/reward" in row}
    best = max((step for step in values if step), key=lambda step: (values[step], -step))
    kept = sorted({best, 2})
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [f"step-{step:06d}" for step in kept]
    assert not (run / "best").exists()
    assert f"`qerl export --run {run} --step {best}` makes a model" in caplog.text


def test_masters_in_bfloat16_move_by_small_steps_and_resume_to_the_same_bits(base, tmp_path):
    small = ("qat.masters=bfloat16", "optim.learning_rate=1e-6", "optim.weight_decay=0")
    whole = start(config_of(base, tmp_path, *small, steps=2), "tiny").run_dir
    early, late = (tensors_in(whole / f"checkpoints/step-00000{step}/weights") for step in (1, 2))
    assert {tensor.dtype for tensor in late.values()} == {torch.bfloat16}
    moved = [(late[name] != early[name]).float().mean().item() for name in late]
    assert all(0 < share < 0.2 for share in moved)  # by steps far below the last place: few of them, and each is whole
    expected = numbers(whole)
    resumed = resume(whole, step=1).run_dir
    assert numbers(resumed) == expected
    again = tensors_in(resumed / "checkpoints/step-000002/weights")
    assert all(torch.equal(again[name], tensor) for name, tensor in late.items())
