"""The correction of the mismatch on a case that can be solved exactly: all 15 completions of up to three tokens.

The policy is a small real model with a vocabulary of three tokens; the sampler is the same model with noise in its
norms. The expectation of the estimator over the sampler is one batch, in which each completion is a row whose advantage
is multiplied by its probability. This batch goes through the trainer's own loss. Its gradient is compared with that of
the expected reward, differentiated through all probabilities.

Weights of whole sequences give the clean policy's gradient exactly, up to truncation, whose bias is what the cap cuts
off. Weights of tokens, the default because of their variance, remove most of the bias but not all of it: prefixes and
continuations keep the distribution of the sampler.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.checkpoint.adapter import adapter_tensors, attach_lora
from qerl.model.norms import block_norms, set_norm_noise_
from tests.helpers.small_run import small_config
from tests.helpers.trainer_factory import build_trainer, run_backward, with_plan
from training.loss.batch import Batch
from training.policy.policy import AdapterPolicy
from training.rollout.noise import draw_noise

END, LONGEST, PROMPT = 0, 3, [1, 2, 1]


def all_completions():
    """All completions: those that end with END, and those truncated at LONGEST."""
    found = []
    for length in range(1, LONGEST + 1):
        for ids in itertools.product(range(3), repeat=length):
            if END not in ids[:-1] and (ids[-1] == END or length == LONGEST):
                found.append(ids)
    return found


COMPLETIONS = all_completions()
REWARDS = torch.tensor([(7 * index % 5) / 4 - 0.4 for index in range(len(COMPLETIONS))])
MASK = torch.tensor([[1] * len(ids) + [0] * (LONGEST - len(ids)) for ids in COMPLETIONS])
PADDED = torch.tensor([[*ids] + [END] * (LONGEST - len(ids)) for ids in COMPLETIONS])


def small_policy():
    sizes = {"vocab_size": 3, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3}
    config = AutoConfig.for_model("qwen3", **sizes, **heads, max_position_embeddings=32)
    torch.manual_seed(0)
    policy = attach_lora(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 4, 8)
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    return policy.train()


class Case:
    """A policy, the logprobs of its sampler under noise of `sigma`, and the trainer whose loss is tested."""

    def __init__(self, base, folder, sigma, *overrides):
        settings = ("loss.type=dr_grpo", "loss.clip_high=0.2", "noise.enabled=false", *overrides)
        self.trainer = build_trainer(small_config(base, folder, *settings), folder)
        self.policy = small_policy()
        parts = self.trainer.parts
        self.parts = with_plan(replace(parts, policy=AdapterPolicy(self.policy)), parts.plan)
        norms = block_norms(self.policy)
        set_norm_noise_(norms, draw_noise({name: norm.weight.numel() for name, norm in norms.items()}, sigma, 0, 0))
        self.sampling = self.logprobs().detach()
        set_norm_noise_(norms, None)
        self.clean = self.logprobs().detach()

    def logprobs(self):
        """Logprobs (15, 3) by plain forward passes over completions of equal length, 0 where masked."""
        rows = torch.zeros(len(COMPLETIONS), LONGEST)
        for length in range(1, LONGEST + 1):
            chosen = [row for row, ids in enumerate(COMPLETIONS) if len(ids) == length]
            ids = torch.tensor([COMPLETIONS[row] for row in chosen])
            whole = torch.cat([torch.tensor([PROMPT] * len(chosen)), ids], 1)
            logits = self.policy(input_ids=whole).logits[:, len(PROMPT) - 1 : -1]
            rows[chosen, :length] = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
        return rows

    def gradient(self, value):
        """The flat gradient of a scalar with respect to the adapter. The graph is kept for further calls."""
        tensors = adapter_tensors(self.policy)
        found = torch.autograd.grad(value, [tensors[name] for name in sorted(tensors)], retain_graph=True)
        return torch.cat([part.flatten() for part in found])

    def true_gradient(self, weights=None):
        """The gradient of sum_c pi(c) R(c); with `weights`, that of sum_c,t weights(c, t) R(c) log pi(c_t)."""
        if weights is None:
            return self.gradient((self.logprobs().sum(-1).exp() * REWARDS).sum())
        return self.gradient((weights * REWARDS[:, None] * self.logprobs() * MASK).sum())

    def estimated(self):
        """The expectation over the sampler of the gradient that the trainer's loss gives."""
        probabilities = self.sampling.sum(-1).exp()
        prompts = torch.tensor([PROMPT] * len(COMPLETIONS))
        rows = (prompts, torch.ones_like(prompts), PADDED, MASK, MASK)
        self.policy.zero_grad()
        self.update = run_backward(self.trainer, Batch(*rows, REWARDS * probabilities, self.sampling), self.parts)
        tensors = adapter_tensors(self.policy)
        flat = torch.cat([tensors[name].grad.flatten() for name in sorted(tensors)])
        return -flat * len(COMPLETIONS) * self.trainer.max_completion_length  # dr_grpo's constant divisor


def far(one, other):
    """|one - other| / |other|"""
    return ((one - other).norm() / other.norm()).item()


def correction(mode, cap=1e6):
    return (f"loss.correction.mode={mode}", f"loss.correction.cap={cap}")


SIGMA = 0.4  # so large that biases are clearly visible


def test_sequence_weights_give_the_gradient_of_the_clean_policy(nvfp4_base, tmp_path):
    case = Case(nvfp4_base, tmp_path, SIGMA, *correction("sequence_truncate"))
    for logprobs in (case.clean, case.sampling):  # each is a distribution over 15 completions
        assert logprobs.sum(-1).exp().sum().item() == pytest.approx(1, abs=1e-6)
    assert far(case.estimated(), case.true_gradient()) < 1e-4


def test_without_a_correction_the_gradient_is_that_of_the_samplers_surrogate(nvfp4_base, tmp_path):
    case = Case(nvfp4_base, tmp_path, SIGMA, "loss.correction.mode=off")
    sampler = case.sampling.sum(-1, keepdim=True).exp()
    assert far(case.estimated(), case.true_gradient(sampler)) < 1e-4
    assert far(case.estimated(), case.true_gradient()) > 0.05


def test_token_weights_leave_a_smaller_bias_of_known_form(nvfp4_base, tmp_path):
    """The weight is mu(c) pi(c_t) / mu(c_t) instead of pi(c): right for completions of one token, else close."""
    case = Case(nvfp4_base, tmp_path, SIGMA, *correction("token_truncate"))
    by_token = case.sampling.sum(-1, keepdim=True).exp() * (case.clean - case.sampling).exp()
    exact = case.true_gradient()
    assert far(case.estimated(), case.true_gradient(by_token)) < 1e-4
    uncorrected = case.true_gradient(case.sampling.sum(-1, keepdim=True).exp())
    assert 0.005 < far(case.estimated(), exact) < far(uncorrected, exact)


@pytest.mark.parametrize(("mode", "cap"), [("sequence_truncate", 1.05), ("sequence_mask", 1.3)])
def test_the_bias_is_what_the_cap_cuts_off(nvfp4_base, tmp_path, mode, cap):
    """bias = -sum_c cut(c) R(c) grad log pi(c), with cut = pi - min(pi, cap mu), or pi if it is masked."""
    case = Case(nvfp4_base, tmp_path, SIGMA, *correction(mode, cap))
    sampler, policy = case.sampling.sum(-1, keepdim=True).exp(), case.clean.sum(-1, keepdim=True).exp()
    over = policy > cap * sampler
    assert over.any()
    cut = torch.where(over, policy - cap * sampler if mode.endswith("truncate") else policy, 0.0)
    bias = case.estimated() - case.true_gradient()
    assert far(bias, -case.true_gradient(cut)) < 1e-2
    slopes = torch.stack([case.gradient(logprobs.sum()).norm() for logprobs in case.logprobs()])
    assert bias.norm() <= (cut[:, 0] * REWARDS.abs() * slopes).sum() * 1.001
