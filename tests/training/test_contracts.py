"""The behaviour of TRL 1.16.0 and transformers 5.17.0 that we rely on: an upgrade that changes it fails here."""

import pytest
import torch

import training.trainer
from tests.helpers.small_run import small_config
from tests.helpers.trainer_factory import batch_of, build_trainer, inputs_of, scores
from training.parts import Parts
from training.policy.policy import AdapterPolicy
from training.run import resume, start
from training.run_dir.checkpoint import checkpoints
from training.trainer import Logprobs


@pytest.fixture
def trainer(nvfp4_base, tmp_path):
    return build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)


def test_the_loss_of_trl_asks_its_model_for_logprobs_once(trainer, monkeypatch):
    """So we can supply the logprobs instead of the model, with a gradient to them and to nothing else."""
    asked = []

    class Watched(Logprobs):
        @property
        def logprobs(self):
            asked.append(self[0])
            return self[0]

    monkeypatch.setattr(training.trainer, "Logprobs", Watched)
    old = scores(trainer).detach()
    inputs = inputs_of(trainer, batch_of(old, old))
    loss, _ = trainer.loss_of(inputs)
    assert [logprobs is inputs.logprobs_B_T for logprobs in asked] == [True]
    (slope,) = torch.autograd.grad(loss, inputs.logprobs_B_T)
    assert slope.abs().sum() > 0


def noted(monkeypatch, *names, owner=training.trainer, calls=None):
    """The calls of these functions of `owner` from here on, by their names; they join `calls` if it is given."""
    calls = [] if calls is None else calls
    for name in names:
        original = getattr(owner, name)

        def call(*args, name=name, original=original):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, call)
    return calls


def test_transformers_asks_for_inputs_and_loss_once_per_step_and_updates_once(nvfp4_base, tmp_path, monkeypatch):
    calls = noted(monkeypatch, "collect", owner=Parts)
    noted(monkeypatch, "backward", owner=training.trainer, calls=calls)
    start(small_config(nvfp4_base, tmp_path, "loss.num_iterations=2", "noise.enabled=false", steps=4), "tiny")
    assert calls == ["collect", "backward", "backward"] * 2


def test_transformers_saves_and_loads_through_ours(nvfp4_base, tmp_path, monkeypatch):
    """And what it writes of its own state when we ask it to is what a resumed run reads."""
    calls = noted(monkeypatch, "write_checkpoint", "set_rates_", owner=training.trainer)
    noted(monkeypatch, "load", owner=AdapterPolicy, calls=calls)
    config = small_config(nvfp4_base, tmp_path, "run.save_every=1", "noise.enabled=false", steps=2)
    run_dir = start(config, "tiny").run_dir
    checkpoint = checkpoints(run_dir)[0]
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth"} <= {path.name for path in checkpoint.iterdir()}
    assert calls == ["write_checkpoint"] * 2
    calls.clear()
    resume(run_dir, step=1)
    assert calls == ["load", "set_rates_", "write_checkpoint"]
