"""The numbers of the trainer: correction and advantages against TRL, and the recipe's values that reach TRL."""

from dataclasses import replace

import pytest
import torch
from trl.trainer.utils import nanstd

from tests.helpers.small_run import small_config
from tests.helpers.trainer_factory import build_trainer
from training.loss.groups import group_advantages, rewards_differ
from training.policy.packed_policy import PackedPolicy
from training.run import start
from training.step import collect
from training.trainer import trl_config


def test_one_update_per_rollout_costs_one_forward_pass(nvfp4_base, tmp_path, monkeypatch):
    calls, logprobs = [], PackedPolicy.logprobs

    def counted(self, *args):
        calls.append(torch.is_grad_enabled())
        return logprobs(self, *args)

    monkeypatch.setattr(PackedPolicy, "logprobs", counted)
    one_micro_batch = ("run.micro_batch_tokens=100000", "noise.enabled=false")
    start(small_config(nvfp4_base, tmp_path, *one_micro_batch, "loss.mismatch_gate=null", steps=1), "tiny")
    assert calls == [True]  # for the loss


def test_the_order_of_rows_depends_on_seed_and_step_alone(nvfp4_base, tmp_path):
    """Ranks have to shuffle alike, whatever each of them drew from the global generator while it sampled."""
    parts = build_trainer(small_config(nvfp4_base, tmp_path), tmp_path).parts
    decode = parts.grader.decode

    def orders(draws):
        def drawing(ids):
            torch.rand(draws)
            return decode(ids)

        other = replace(parts, grader=replace(parts.grader, decode=drawing))
        batches = [collect(other, parts.prompts[:2], step).batch for step in (0, 1)]
        return [batch.completion_ids_B_T.tolist() for batch in batches]

    assert orders(3) == orders(0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_those_of_trl_to_the_bit(scale):
    """The formula of TRL 1.16 (GRPOTrainer, sum_then_normalize), for groups whose rewards differ."""
    torch.manual_seed(1)
    for size in (2, 4, 7, 8, 16):
        rewards = torch.rand(6 * size)
        mean = torch.nanmean(rewards.view(-1, size), dim=1).repeat_interleave(size)
        std = nanstd(rewards.view(-1, size), dim=1).repeat_interleave(size) if scale == "group" else nanstd(rewards)
        expected = rewards - mean if scale == "none" else (rewards - mean) / (std + 1e-4)
        assert torch.equal(group_advantages(rewards.view(-1, size), scale)[0].flatten(), expected)


def test_advantages_of_completions_without_a_reward_are_those_of_trl():
    rewards = torch.tensor([[1.0, torch.nan, 0.0, 0.5], [torch.nan, 0.25, torch.nan, torch.nan], [torch.nan] * 4])
    mean, std = rewards.nanmean(1, keepdim=True), nanstd(rewards, dim=1)[:, None]
    assert rewards_differ(rewards).tolist() == [True, False, False]
    expected = ((rewards - mean) / (std + 1e-4)).nan_to_num(0.0)
    torch.testing.assert_close(group_advantages(rewards, "group")[0], expected)


def test_the_recipe_reaches_trl(nvfp4_base, tmp_path):
    config = small_config(
        nvfp4_base, tmp_path, "loss.type=grpo", "loss.kl_coef=0.04", "loss.entropy_coef=0.01",
        "loss.advantage_scale=batch", "optim.weight_decay=0.1", "optim.beta2=0.95", "optim.schedule=linear",
    )  # fmt: skip
    args = trl_config(config, tmp_path)
    assert (args.loss_type, args.beta, args.entropy_coef, args.scale_rewards) == ("grpo", 0.04, 0.01, "batch")
    assert (args.weight_decay, args.adam_beta2, args.lr_scheduler_type) == (0.1, 0.95, "linear")
    assert (args.epsilon, args.epsilon_high, args.max_grad_norm) == (0.2, 0.28, 1.0)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 1)
    assert (args.steps_per_generation, args.generation_batch_size, args.num_generations) == (1, 8, 4)
    assert (args.max_steps, args.max_completion_length, args.temperature) == (6, 8, 1.0)
