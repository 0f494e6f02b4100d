"""Sampler, `score`, policy, and transformers in float32 give a token the same logprob."""

from __future__ import annotations

import gc

import torch

from engine_checks.context import Context
from qerl.engine.interface import SamplingParams
from qerl.engine.transformers.engine import kv_in_8_bits
from qerl.model.packing import pack
from training.policy.packed_policy import PackedPolicy


def compare(context: Context, completions: list, temperature: float) -> dict:
    prompts = context.prompts[: len(completions)]
    sampled = [c.logprobs for c in completions]
    trained = policy_logprobs(context.policy, prompts, [c.token_ids for c in completions], temperature)
    scored = context.engine.score(prompts, [c.token_ids for c in completions], temperature)
    return {"policy": mismatch(sampled, trained), "score": mismatch(sampled, scored)}


@torch.no_grad()
def policy_logprobs(model, prompts: list, completions: list, temperature: float = 1.0, **more) -> list[list[float]]:
    """Of plain forward passes, which get `more`; keys and values are rounded if `model` has scales for them."""
    rows = []
    with kv_in_8_bits(model):
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = torch.tensor([[*prompt, *completion]], device="cuda")
            logits = model(input_ids=tokens, use_cache=False, **more).logits[0, len(prompt) - 1 : -1].float()
            picked = torch.log_softmax(logits / temperature, -1).gather(1, tokens[0, len(prompt) :, None])
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


@torch.no_grad()
def packed_logprobs(model, prompts: list, completions: list) -> list[list[float]]:
    """As a training step computes them: all sequences in one row, equal prompts once."""
    before, width = max(map(len, prompts)), max(map(len, completions))
    rows = list(zip(prompts, completions, strict=True))
    ids = torch.tensor([[0] * (before - len(p)) + [*p, *c] + [0] * (width - len(c)) for p, c in rows])
    places = torch.arange(before + width)
    mask = torch.stack([(places >= before - len(p)) & (places < before + len(c)) for p, c in rows])
    policy = PackedPolicy(model, 1.0, None)
    found, _ = policy.logprobs(pack(ids, mask, width, policy.layout), (len(ids), width))
    return [row[: len(c)] for row, c in zip(found.tolist(), completions, strict=True)]


def agreement(context: Context) -> dict:
    """Sampling logprobs against those of the policy, alone and packed, and of `score`."""
    completions = context.engine.generate(context.prompts, context.sampling, seed=3)
    twice = [*completions, *completions[:2]]
    packed = packed_logprobs(context.policy, [*context.prompts, *context.prompts[:2]], [c.token_ids for c in twice])
    found = {"packed": mismatch([c.logprobs for c in twice], packed), **compare(context, completions, temperature=1.0)}
    return found | {"lengths": sum(len(c.token_ids) for c in completions)}


def temperature(context: Context) -> dict:
    """The same at temperature 0.7 without top-k: logprobs are those of the distribution that was sampled from."""
    sampling = SamplingParams(max_new_tokens=32, temperature=0.7)
    completions = context.engine.generate(context.prompts[:8], sampling, seed=3)
    return compare(context, completions, temperature=0.7)


def oracle(context: Context) -> dict:
    """Sampler, `score` and policy against transformers in float32 on the checkpoint's own tensors."""
    from qerl.checkpoint.adapter import load_start_
    from qerl.checkpoint.load import load_model

    prompts = context.prompts[:8]
    completions = context.engine.generate(prompts, context.sampling, seed=9)
    tokens = [c.token_ids for c in completions]
    policy = policy_logprobs(context.policy, prompts, tokens)
    score = context.engine.score(prompts, tokens)
    exact_model = load_model(context.arguments.model, context.arguments.format, "float32", "cuda")
    if context.start is not None:
        load_start_(exact_model, context.start)
    exact = policy_logprobs(exact_model, prompts, tokens)
    del exact_model
    gc.collect()
    torch.cuda.empty_cache()
    sampled = [c.logprobs for c in completions]
    return {"sampled": mismatch(sampled, exact), "policy": mismatch(policy, exact), "score": mismatch(score, exact)}
