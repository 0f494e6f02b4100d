"""The trainer's numbers: the correction against TRL's own, batch invariance, what of the recipe reaches TRL."""

import pytest
import torch
from small_run import small_config
from trainer_factory import MASK, build_trainer, loss_inputs, scores

from training.run import start
from training.run_dir.log import completion_rows
from training.trainer import QerlTrainer
from training.trl_config import trl_config


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_correction_is_trls_without_its_second_forward(nvfp4_base, tmp_path, mode):
    """TRL computes old logprobs by a pass of their own and weighs with them; one pass has to give the same loss."""
    config = small_config(nvfp4_base, tmp_path, f"loss.correction.mode={mode}", "noise.enabled=false", steps=3)
    trainer = build_trainer(config, tmp_path)
    torch.manual_seed(3)
    logprobs = scores(trainer).detach()
    sampling = logprobs + 0.5 * torch.randn(4, 4)
    difference = (logprobs - sampling) * MASK
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    weights = ratio.clamp(max=2.0) if mode.endswith("truncate") else ratio * (ratio <= 2.0)
    inputs = loss_inputs(logprobs, sampling)
    del inputs["old_per_token_logps"]  # one update a rollout: TRL's correction would compute them
    ours = trainer._compute_loss(trainer.model, inputs)
    reference = loss_inputs(logprobs, sampling) | {"importance_sampling_ratio": weights}
    trainer.vllm_importance_sampling_correction = True
    theirs = super(QerlTrainer, trainer)._compute_loss(trainer.model, reference)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_one_update_a_rollout_costs_one_scoring_forward(nvfp4_base, tmp_path, monkeypatch):
    calls = []
    original = QerlTrainer._get_per_token_logps_and_entropies

    def counted(self, *args, **kwargs):
        calls.append(self._loss_inputs is not None)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(QerlTrainer, "_get_per_token_logps_and_entropies", counted)
    one_micro_batch = ("run.micro_batch_tokens=100000", "noise.enabled=false")
    start(small_config(nvfp4_base, tmp_path, *one_micro_batch, steps=2), "tiny")
    assert calls == [True] * 2  # one a step, inside the loss


def test_groups_are_normalized_alone(nvfp4_base, tmp_path):
    """Advantage = (reward - mean of its group) / (std of its group + 1e-4), with the unbiased std."""
    trainer = build_trainer(small_config(nvfp4_base, tmp_path, "logging.completions_count=8"), tmp_path)
    rows = [trainer.train_dataset[i] for i in (0, 1) for _ in range(4)]
    trainer._generate_and_score_completions(rows)
    sampled = completion_rows(trainer._logs)
    rewards = torch.tensor([row["rewards"]["digits"] for row in sampled]).view(2, 4)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    got = torch.tensor([row["advantage"] for row in sampled]).view(2, 4)
    torch.testing.assert_close(got, expected)
    assert {row["prompt"] for row in sampled[:4]} != {row["prompt"] for row in sampled[4:]}


def test_the_recipe_reaches_trl(nvfp4_base, tmp_path):
    config = small_config(
        nvfp4_base, tmp_path, "loss.type=grpo", "loss.kl_coef=0.04", "loss.entropy_coef=0.01",
        "loss.advantage_scale=batch", "optim.weight_decay=0.1", "optim.beta2=0.95", "optim.schedule=linear",
    )  # fmt: skip
    args = trl_config(config, tmp_path, [1.0])
    assert (args.loss_type, args.beta, args.entropy_coef, args.scale_rewards) == ("grpo", 0.04, 0.01, "batch")
    assert (args.weight_decay, args.adam_beta2, args.lr_scheduler_type) == (0.1, 0.95, "linear")
    assert (args.epsilon, args.epsilon_high, args.max_grad_norm) == (0.2, 0.28, 1.0)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 1)
    assert (args.steps_per_generation, args.generation_batch_size, args.num_generations) == (1, 8, 4)
    assert (args.max_steps, args.max_completion_length, args.temperature) == (6, 8, 1.0)
