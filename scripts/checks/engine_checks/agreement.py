"""Sampler, `score`, policy, and transformers in float32 give a token the same logprob."""

from __future__ import annotations

import gc

import torch

from engine_checks.compare import compare, mismatch, policy_logprobs
from engine_checks.context import Context
from qerl.engine.interface import SamplingParams


def agreement(context: Context) -> dict:
    """Sampling logprobs against those of the policy and of `score`."""
    completions = context.engine.generate(context.prompts, context.sampling, seed=3)
    return compare(context, completions, temperature=1.0) | {"lengths": sum(len(c.token_ids) for c in completions)}


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
