"""The behaviour of TRL 1.16.0 and transformers 5.17.0 that we rely on: an upgrade that changes it fails here."""

import inspect

import pytest
import torch
from small_run import small_config
from trainer_factory import batch_of, build_trainer, inputs_of, scores
from transformers import Trainer
from trl import GRPOTrainer

import training.trainer
from training.run import start
from training.trainer import QerlTrainer


@pytest.fixture
def trainer(nvfp4_base, tmp_path):
    return build_trainer(small_config(nvfp4_base, tmp_path, "noise.enabled=false"), tmp_path)


def test_the_loss_of_trl_asks_its_model_for_logprobs_once(trainer, monkeypatch):
    """So we can supply the logprobs instead of the model, with a gradient to them and to nothing else."""
    asked, given = [], QerlTrainer._get_per_token_logps_and_entropies

    def counted(self, model, *args, **kwargs):
        asked.append(model)
        return given(self, model, *args, **kwargs)

    monkeypatch.setattr(QerlTrainer, "_get_per_token_logps_and_entropies", counted)
    old = scores(trainer).detach()
    inputs = inputs_of(trainer, batch_of(old, old))
    loss, _ = trainer.loss_of(inputs)
    assert [model.logprobs is inputs.logprobs_B_T for model in asked] == [True]
    (slope,) = torch.autograd.grad(loss, inputs.logprobs_B_T)
    assert slope.abs().sum() > 0


def test_the_loss_of_trl_is_multiplied_by_the_given_weights(trainer):
    old = scores(trainer).detach()
    whole = inputs_of(trainer, batch_of(old, old))
    halved = inputs_of(trainer, batch_of(old, old + torch.tensor(2.0).log()))  # twice as likely for the sampler
    losses = [trainer.loss_of(inputs)[0].item() for inputs in (whole, halved)]
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-5)


def test_transformers_asks_for_inputs_and_loss_once_per_step_and_updates_once(nvfp4_base, tmp_path, monkeypatch):
    calls = []
    for name in ("collect", "backward"):
        original = getattr(training.trainer, name)

        def noted(*args, name=name, original=original):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(training.trainer, name, noted)
    start(small_config(nvfp4_base, tmp_path, "loss.num_iterations=2", "run.save_every=2", steps=4), "tiny")
    assert calls == ["collect", "backward", "backward"] * 2


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (Trainer, "get_train_dataloader", ["self"]),
        (Trainer, "_prepare_inputs", ["self", "inputs"]),
        (GRPOTrainer, "_compute_loss", ["self", "model", "inputs"]),
        (GRPOTrainer, "compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        (GRPOTrainer, "training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        (GRPOTrainer, "log", ["self", "logs", "start_time"]),
        (Trainer, "_save_checkpoint", ["self", "model", "trial"]),
        (Trainer, "_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        (Trainer, "_save_optimizer_and_scheduler", ["self", "output_dir"]),
        (Trainer, "_save_rng_state", ["self", "output_dir"]),
    ],
)
def test_what_we_override_or_call_has_the_same_parameters(owner, name, parameters):
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters
