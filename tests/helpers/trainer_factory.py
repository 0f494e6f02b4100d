"""A trainer as a run builds it, before its first step, and a batch of four completions for one loss."""

from dataclasses import replace

import torch

from qerl.checkpoint.adapter import adapter_tensors
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.resolve import resolve_model
from qerl.data.tasks import get_task
from tests.helpers.built_rewards import build_rewards
from training.loss.batch import Batch, MicroBatch
from training.parts import Given, Loaded, make_parts
from training.policy.packed_policy import PackedPolicy
from training.policy.policy import build_policy
from training.policy.teacher import find_teacher
from training.policy.train_memory import plan_run
from training.preflight.checks import sizes_at
from training.preflight.plan import wishes_of
from training.rewards.rewards import fixed_columns
from training.rollout.prompts import load_prompts
from training.run import open_rollout_engine
from training.run_dir.log import RunLog
from training.step import backward, loss_inputs
from training.trainer import QerlTrainer, trl_config

PROMPT = torch.tensor([[3, 4, 5], [3, 4, 5], [6, 7, 8], [6, 7, 8]])
COMPLETION = torch.tensor([[10, 11, 12, 13], [14, 15, 0, 0], [16, 17, 18, 0], [19, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.7, -0.7])


def build_trainer(config, folder):
    """A trainer as `training.run` builds it, before its first step; its adapter is random, so that it acts."""
    base = resolve_model(config.model.base, config.model.format)
    tokenizer = load_tokenizer(base.base)
    prompts = load_prompts(config.data, tokenizer, 1)
    fixed = fixed_columns(get_task(config.data.task), config.rollout.max_new_tokens)
    rewards = build_rewards(config.rewards, fixed, [prompt.example for prompt in prompts], folder)
    engine = open_rollout_engine(config, base)
    policy = build_policy(engine, base, config.adapter, config.run.seed)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in adapter_tensors(policy.model).values():
            tensor.add_(0.05 * torch.randn_like(tensor))
    given, log = Given(tokenizer, prompts, rewards), RunLog(folder, 1)
    entropy, cap_gib = config.loss.entropy_coef > 0, config.memory.cap_gib
    plan = plan_run(policy, engine, wishes_of(config), config.adapter.rank, entropy, cap_gib)
    args = trl_config(config, folder)
    teacher = None
    if config.distill is not None:
        teacher = find_teacher(config, base, tokenizer, sizes_at(base)).opened(config, torch.device("cpu"))
    parts = make_parts(config, given, Loaded(engine, policy, plan, teacher), log)
    trainer = QerlTrainer(parts, args, [])
    trainer.current_gradient_accumulation_steps = 1  # transformers sets it when it begins to train
    trainer.model.train()
    trainer.gate.passed = True  # the gate is not what is tested here
    return trainer


def with_plan(parts, plan):
    """The parts with another plan, and the policy packed by it."""
    config = parts.config
    entropy = config.loss.entropy_coef > 0
    packed = PackedPolicy(parts.policy.base_model, config.rollout.temperature, plan, entropy)
    return replace(parts, plan=plan, packed=packed)


def scores(trainer):
    """(B, T) logprobs at the recipe's temperature by a plain forward pass over unpadded rows."""
    rows = torch.zeros(4, 4)
    for i in range(4):
        length = int(MASK[i].sum())
        ids = torch.cat([PROMPT[i], COMPLETION[i, :length]])[None]
        logits = trainer.model(input_ids=ids).logits[0, 2:-1] / trainer.temperature
        rows[i, :length] = torch.log_softmax(logits.float(), -1).gather(-1, COMPLETION[i, :length, None])[:, 0]
    return rows


def batch_of(old, sampling, reference=None):
    """The four completions with the given logprobs (4, 4)."""
    prompt_mask = torch.ones_like(PROMPT)
    return Batch(PROMPT, prompt_mask, COMPLETION, MASK, MASK, ADVANTAGES, sampling, old, reference)


def inputs_of(trainer, batch):
    """What the loss of a whole batch, as one micro-batch, is computed from."""
    ids, mask = batch.tokens()
    whole = MicroBatch(batch, int(batch.loss_mask_B_T.sum()), 1.0, 1.0, ids, mask, batch.loss_mask_B_T)
    parts = trainer.parts
    return loss_inputs(parts, whole, whole.packed(parts.packed.layout), batch.loss_mask_B_T.sum())


def run_backward(trainer, batch, parts=None):
    """`training.step.backward` as the trainer calls it."""
    parts = parts or trainer.parts
    return backward(parts, batch, parts.objective(trainer.loss_of), trainer.accelerator.backward)
