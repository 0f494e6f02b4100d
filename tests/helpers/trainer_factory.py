"""A trainer as a run builds it, before its first step, and the inputs of one loss."""

import torch

from qerl.checkpoint.adapter import adapter_tensors
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from training.parts import TrainerParts
from training.policy.build import build_policy
from training.policy.train_memory import plan_run
from training.rewards.rewards import build_rewards
from training.rollout.prompts import load_prompts
from training.rollout.rollout import Rollout
from training.run import open_rollout_engine
from training.run_dir.log import RunLog
from training.trainer import QerlTrainer


def build_trainer(config, folder):
    """A trainer as `training.run` builds it, before its first step; its adapter is random, so that it acts."""
    base = resolve_model(config.model.base, config.model.format)
    tokenizer = load_tokenizer(base.base)
    prompts = load_prompts(config.data, tokenizer, 1)
    rewards = build_rewards(config, prompts.examples, folder)
    engine = open_rollout_engine(config, base)
    policy = build_policy(engine, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.add_(0.05 * torch.randn_like(tensor))
    rollout = Rollout(engine, policy, config)
    plan = plan_run(config, policy, engine)
    parts = TrainerParts(config, policy, tokenizer, prompts, rewards, rollout, plan, folder, RunLog(folder, 1))
    trainer = QerlTrainer(parts, [])
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    trainer.model.train()
    trainer._gate.passed = True  # the gate is not what is tested here
    return trainer


PROMPT = torch.tensor([[3, 4, 5], [3, 4, 5], [6, 7, 8], [6, 7, 8]])

COMPLETION = torch.tensor([[10, 11, 12, 13], [14, 15, 0, 0], [16, 17, 18, 0], [19, 0, 0, 0]])

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])

ADVANTAGES = torch.tensor([1.0, -1.0, 0.7, -0.7])


def scores(trainer):
    """(B, T) logprobs at the recipe's temperature by a plain forward pass over unpadded rows."""
    rows = torch.zeros(4, 4)
    for i in range(4):
        length = int(MASK[i].sum())
        ids = torch.cat([PROMPT[i], COMPLETION[i, :length]])[None]
        logits = trainer.model(input_ids=ids).logits[0, 2:-1] / trainer.temperature
        rows[i, :length] = torch.log_softmax(logits.float(), -1).gather(-1, COMPLETION[i, :length, None])[:, 0]
    return rows


def loss_inputs(old, sampling):
    return {
        "prompt_ids": PROMPT,
        "prompt_mask": torch.ones_like(PROMPT),
        "completion_ids": COMPLETION,
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "num_items_in_batch": MASK.sum(),
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
    }
