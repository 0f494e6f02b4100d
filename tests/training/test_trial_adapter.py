"""A trial adapter before the first step: an engine that leaves it out is refused, and nothing of it stays in a run."""

import logging
import random
import shutil
from dataclasses import replace

import numpy
import pytest
import torch

import training.trainer
import training.trial_adapter
from qerl.base.errors import EngineError
from qerl.base.parallel import Parallel
from qerl.checkpoint.adapter import adapter_tensors
from qerl.engine.transformers.engine import TransformersEngine
from tests.helpers.small_run import numbers, same_adapters, small_config
from tests.helpers.trainer_factory import build_trainer
from training.loss.gates import MismatchGate
from training.run import resume, start
from training.run_dir.log import read_metrics
from training.trial_adapter import drawn_, try_adapter, zero_factors

pytestmark = pytest.mark.usefixtures("one_thread")
VALIDATED = ("validation.every=2", "validation.limit=2")
IN_8_BITS = ("rollout.kv_cache_dtype=fp8", "noise.enabled=false")
EXPERTS = ("adapter.experts=per_expert", "adapter.expert_rank=2")


@pytest.fixture
def engine_with(monkeypatch):
    """Let the engine sample with so much of the adapter that the trainer has."""
    original = TransformersEngine.generate

    def patch(share):
        @torch.no_grad()
        def generate(self, *args):
            named = adapter_tensors(self.policy_model()).items()
            before = {tensor: tensor.detach().clone() for name, tensor in named if name.endswith("lora_B.weight")}
            for factor in before:
                factor.mul_(share)
            done = original(self, *args)
            for factor, value in before.items():
                factor.copy_(value)
            return done

        monkeypatch.setattr(TransformersEngine, "generate", generate)

    return patch


@pytest.fixture
def trials(monkeypatch):
    """The moves of all draws that are made, in nats per token."""
    original, moves = training.trial_adapter.trial_of, []

    def noted(*args):
        trial = original(*args)
        moves.append(trial.moved)
        return trial

    monkeypatch.setattr(training.trial_adapter, "trial_of", noted)
    return moves


def at_zero(config, folder):
    """A trainer whose adapter has B = 0, and a gate that has not judged yet."""
    trainer = build_trainer(config, folder)
    with torch.no_grad():
        for name, tensor in adapter_tensors(trainer.model).items():
            if name.endswith("lora_B.weight"):
                tensor.zero_()
    return trainer, MismatchGate(config.loss.mismatch_gate, 0.0)


@pytest.mark.parametrize(
    ("base_name", "settings"),
    [
        ("nvfp4_base", ("adapter.dropout=0.2",)),
        ("nvfp4_base", ("noise.where=both", "adapter.train_norms=true")),
        ("nvfp4_moe", EXPERTS),
    ],
)
def test_an_engine_without_the_adapter_is_refused_before_anything_is_sampled(
    request, tmp_path, engine_with, base_name, settings
):
    """At B = 0 it agrees with the trainer: no first step could tell, and with dropout none is judged."""
    engine_with(0.0)
    with pytest.raises(EngineError, match=r"the adapter does not act in the engine: .* the engine shows -?0%,"):
        start(small_config(request.getfixturevalue(base_name), tmp_path, *settings, steps=3), "tiny")
    assert read_metrics(tmp_path / "run") == []


def test_an_engine_with_a_part_of_the_adapter_disagrees_by_the_gate(nvfp4_base, tmp_path, engine_with):
    engine_with(0.3)
    with pytest.raises(EngineError, match=r"does not act in the engine: .* shows [23]\d%,"):
        start(small_config(nvfp4_base, tmp_path, steps=3), "tiny")
    engine_with(0.8)
    with pytest.raises(EngineError, match=r"under a trial adapter: mismatch_kl .* above loss\.mismatch_gate 1e"):
        start(small_config(nvfp4_base, tmp_path, "loss.mismatch_gate=1e-6", steps=3, out="other"), "tiny")


@pytest.mark.parametrize(
    ("base_name", "settings"),
    [
        ("nvfp4_base", ("noise.where=both", "adapter.train_norms=true", "adapter.dropout=0.1", *VALIDATED)),
        ("nvfp4_moe", ("loss.num_iterations=2", "loss.kl_coef=0.05", *EXPERTS, *IN_8_BITS)),
    ],
    ids=["noise", "experts"],
)
def test_a_run_has_the_numbers_of_one_without_the_trial(request, tmp_path, monkeypatch, trials, base_name, settings):
    base = request.getfixturevalue(base_name)
    tried = start(small_config(base, tmp_path, *settings, steps=3, out="tried"), "tiny").run_dir
    assert training.trial_adapter.LEAST <= trials[-1] <= training.trial_adapter.MOST
    monkeypatch.setattr(training.trainer, "try_adapter", lambda *_: None)
    plain = start(small_config(base, tmp_path, *settings, steps=3, out="plain"), "tiny").run_dir
    assert numbers(tried) == numbers(plain)
    assert same_adapters(tried / "adapter", plain / "adapter")


def test_b_is_zero_again_and_random_streams_go_on(nvfp4_base, tmp_path, monkeypatch, caplog):
    trainer, gate = at_zero(small_config(nvfp4_base, tmp_path), tmp_path)
    before = {name: tensor.detach().clone() for name, tensor in adapter_tensors(trainer.model).items()}
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with caplog.at_level(logging.INFO):
        try_adapter(trainer.parts, gate)
    assert "of which the engine has 100%" in caplog.text
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == streams[1:]
    for name, tensor in adapter_tensors(trainer.model).items():
        assert torch.equal(tensor.view(torch.int32), before[name].view(torch.int32))  # -0.0 is not 0.0
    assert trainer.model.training
    assert not gate.passed  # the first step is judged too
    monkeypatch.setattr(TransformersEngine, "generate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        try_adapter(trainer.parts, gate)
    assert zero_factors(trainer.parts.policy)


@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_the_draw_is_resized_until_it_moves_the_trainer_clearly(nvfp4_base, tmp_path, monkeypatch, trials, size):
    trainer, gate = at_zero(small_config(nvfp4_base, tmp_path), tmp_path)
    monkeypatch.setattr(training.trial_adapter, "SIZE", size)
    try_adapter(trainer.parts, gate)
    assert not training.trial_adapter.LEAST <= trials[0] <= training.trial_adapter.MOST
    assert training.trial_adapter.LEAST <= trials[-1] <= training.trial_adapter.MOST


def test_a_draw_depends_on_the_seed_alone():
    one, two = ((torch.zeros(6, 4), torch.zeros(5, 4)) for _ in range(2))
    other = (torch.zeros(6, 4),)
    with drawn_(one, 7, 0.5), drawn_(two, 7, 0.5), drawn_(other, 8, 0.5):
        assert all(torch.equal(first, second) for first, second in zip(one, two, strict=True))
        assert not torch.equal(one[0], other[0])
        assert not torch.equal(one[0][:5], one[1])
        assert torch.cat(one).std().item() == pytest.approx(0.25, rel=0.4)
    assert not any(factor.any() for factor in (*one, *two, *other))


def test_another_start_and_an_open_gate_need_no_trial(nvfp4_base, tmp_path, trials):
    trainer, gate = at_zero(small_config(nvfp4_base, tmp_path), tmp_path)
    try_adapter(trainer.parts, MismatchGate(None, 0.0))
    factor = zero_factors(trainer.parts.policy)[-1]
    with torch.no_grad():
        factor[0, 0] = 1e-30
    try_adapter(trainer.parts, gate)
    assert trials == []
    with torch.no_grad():
        factor.zero_()
    try_adapter(trainer.parts, gate)
    assert trials


def test_what_is_trained_through_the_quantizer_and_a_resumed_run_need_no_trial(base, whole_run, tmp_path, trials):
    """No adapter is in the engine: its way is that of the weights."""
    for mode in ("weights", "adapter"):
        settings = (f"qat.mode={mode}", "noise.enabled=false", "optim.learning_rate=1e-3")
        start(small_config(base, tmp_path, *settings, steps=1, out=mode), "tiny")
    resume(shutil.copytree(whole_run, tmp_path / "run"), step=4)
    assert trials == []


def test_the_engine_of_one_rank_ends_all(nvfp4_base, tmp_path):
    """Each rank tries its own engine; the second one's shows nothing of the change."""

    class Two(Parallel):
        def gather(self, value):
            return [value, replace(value, engine=value.without)]

    trainer, gate = at_zero(small_config(nvfp4_base, tmp_path), tmp_path)
    with pytest.raises(EngineError, match="the adapter does not act in the engine"):
        try_adapter(replace(trainer.parts, parallel=Two()), gate)
