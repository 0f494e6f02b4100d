"""The numbers of the trainer: correction and advantages against TRL, and the recipe's values that reach TRL."""

from dataclasses import replace

import pytest
import torch
from trl.trainer.utils import nanstd

from tests.helpers.small_run import small_config
from tests.helpers.trainer_factory import MASK, batch_of, build_trainer, inputs_of, scores
from training.loss.groups import group_advantages
from training.policy.packed_policy import PackedPolicy
from training.run import start
from training.step import collect
from training.trainer import trl_config


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_correction_equals_that_of_trl_without_its_second_forward_pass(nvfp4_base, tmp_path, mode):
    """TRL computes old logprobs in a separate pass for the weights; one pass has to give the same loss."""
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
    inputs = inputs_of(trainer, batch_of(None, sampling))  # one update per rollout needs no old logprobs
    ours, _ = trainer.loss_of(inputs)
    theirs, _ = trainer.loss_of(replace(inputs, rows=batch_of(logprobs, sampling), weights=weights))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_one_update_per_rollout_costs_one_forward_pass(nvfp4_base, tmp_path, monkeypatch):
    calls, logprobs = [], PackedPolicy.logprobs

    def counted(self, *args):
        calls.append(torch.is_grad_enabled())
        return logprobs(self, *args)

    monkeypatch.setattr(PackedPolicy, "logprobs", counted)
    one_micro_batch = ("run.micro_batch_tokens=100000", "noise.enabled=false")
    start(small_config(nvfp4_base, tmp_path, *one_micro_batch, "loss.mismatch_gate=null", steps=2), "tiny")
    assert calls == [True] * 2  # one per step, for the loss


def test_each_group_is_normalized_by_itself(nvfp4_base, tmp_path):
    """Advantage = (reward - mean of its group) / (std of its group + 1e-4), with the unbiased std."""
    trainer = build_trainer(small_config(nvfp4_base, tmp_path), tmp_path)
    collected = collect(trainer.parts, trainer.parts.prompts[:2], 0)
    rewards = torch.stack([graded.total_G for graded in collected.groups])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(collected.advantages_P_G, expected)
    assert [graded.group.prompt.row for graded in collected.groups] == [0, 1]
    shuffled = collected.batch.advantages_B.sort().values
    assert torch.equal(shuffled, collected.advantages_P_G.flatten().sort().values)


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
