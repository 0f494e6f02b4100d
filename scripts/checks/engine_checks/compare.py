"""Compares completions with one another, and their logprobs with those of the policy and of `score`."""

from __future__ import annotations

import torch

from engine_checks.context import Context
from qerl.engine.transformers.engine import kv_in_8_bits


def compare(context: Context, completions: list, temperature: float) -> dict:
    prompts = context.prompts[: len(completions)]
    sampled = [c.logprobs for c in completions]
    trained = policy_logprobs(context.policy, prompts, [c.token_ids for c in completions], temperature)
    scored = context.engine.score(prompts, [c.token_ids for c in completions], temperature)
    return {"policy": mismatch(sampled, trained), "score": mismatch(sampled, scored)}


@torch.no_grad()
def policy_logprobs(model, prompts: list, completions: list, temperature: float = 1.0) -> list[list[float]]:
    """Of plain forward passes; keys and values are rounded if `model` has scales for them."""
    with kv_in_8_bits(model):
        return _logprobs(model, prompts, completions, temperature)


def _logprobs(model, prompts: list, completions: list, temperature: float) -> list[list[float]]:
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion]], device="cuda")
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
        picked = torch.log_softmax(logits, -1).gather(1, tokens[0, len(prompt) :, None])
        rows.append(picked[:, 0].tolist())
    return rows


def mismatch(sampled: list, trained: list) -> dict:
    a = torch.tensor([v for row in sampled for v in row], dtype=torch.float64)
    b = torch.tensor([v for row in trained for v in row], dtype=torch.float64)
    ratio = b - a
    return {
        "mean_abs": ratio.abs().mean().item(),
        "max_abs": ratio.abs().max().item(),
        "kl": (ratio.exp() - ratio - 1).mean().item(),
    }


def same(a: list, b: list) -> dict:
    return {
        "tokens": sum(x.token_ids == y.token_ids for x, y in zip(a, b, strict=True)) / len(a),
        "logprobs": sum(x.logprobs == y.logprobs for x, y in zip(a, b, strict=True)) / len(a),
    }
