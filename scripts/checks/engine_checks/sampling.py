"""Sampling: seeds and repeated calls, frequencies, stop tokens, lengths, filters."""

from __future__ import annotations

import torch

from engine_checks.compare import same
from engine_checks.context import Context
from qerl.engine.interface import SamplingParams


def repeat(context: Context) -> dict:
    """The share of completions whose tokens, and whose logprobs to the bit, a repeated call reproduces."""
    engine = context.engine
    first = engine.generate(context.prompts, context.greedy)
    warm = engine.generate(context.prompts, context.greedy)
    engine.llm.reset_prefix_cache()
    cold = engine.generate(context.prompts, context.greedy)
    engine.llm.reset_prefix_cache()
    cold2 = engine.generate(context.prompts, context.greedy)
    seeds = [engine.generate(context.prompts, context.sampling, seed=s) for s in (5, 5, 6)]
    half = len(context.prompts) // 2
    second_half = engine.generate(context.prompts[half:], context.sampling, seed=5, first_index=half)
    return {
        "warm_prefix_cache": same(first, warm),
        "cold": same(first, cold),
        "cold_again": same(cold, cold2),
        "same_seed": same(seeds[0], seeds[1]),
        "other_seed": same(seeds[0], seeds[2]),
        "second_half_by_index": same(seeds[0][half:], second_half),
        "distinct_within_call": len(
            {tuple(c.token_ids) for c in engine.generate([context.prompts[0]] * 8, context.sampling, seed=1)}
        ),
    }


def steps(context: Context) -> dict:
    """Sequences that end at different steps, sampled with one and with several decode steps per call of the scheduler:
    the share with equal tokens and logprobs, with our sampler and with vLLM's own."""
    from qerl.engine.vllm.multi_step import MOST_STEPS, allow_steps_

    engine, prompts = context.engine, context.prompts[:8]
    free = engine.generate(prompts, context.greedy)
    stops = tuple({completion.token_ids[5 + place] for place, completion in enumerate(free)})
    found = {}
    for name, top_k in (("drawn", 0), ("filtered", 5)):
        lengths = [SamplingParams(40 - place, 1.0, top_k=top_k, stop_token_ids=stops) for place in range(len(prompts))]
        made = []
        for most in (1, MOST_STEPS, MOST_STEPS):
            allow_steps_(engine.llm, most)
            engine.llm.reset_prefix_cache()
            made.append(engine.generate(prompts, lengths, seed=3))
        found[name] = same(made[0], made[1])
        found[f"{name}_again"] = same(made[1], made[2])
        found[f"{name}_reasons"] = sorted({completion.finish_reason for completion in made[1]})
    return found


def sampler(context: Context) -> dict:
    """The fused sampler against torch: frequencies of 200,000 draws, logprobs, repeated seeds, greedy draws."""
    from qerl.engine.vllm.kernels import draw

    generator = torch.Generator("cuda").manual_seed(3)
    vocabulary, draws = 5003, 200_000
    logits = (torch.randn(4, vocabulary, generator=generator, device="cuda") * 3).bfloat16()
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.5], device="cuda")
    seeds, positions = torch.arange(4, device="cuda"), torch.tensor([9, 9, 9, 9], device="cuda")
    rows = torch.arange(4, device="cuda", dtype=torch.int32)
    scaled = logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    exact = scaled.log_softmax(-1)
    tokens, logprobs = draw(logits, rows, temperature, seeds, positions)
    again, _ = draw(logits, rows, temperature, seeds, positions)
    one = logits[:1].expand(draws, vocabulary)
    which = torch.zeros(draws, device="cuda", dtype=torch.int32)
    many, _ = draw(one, which, temperature[:1], seeds[:1], torch.arange(draws, device="cuda"))
    observed = torch.bincount(many, minlength=vocabulary).double()
    expected = exact[0].double().exp() * draws
    often = expected >= 20
    statistic = ((observed - expected)[often] ** 2 / expected[often]).sum().item()
    degrees = int(often.sum())
    return {
        "largest_logprob_error": (logprobs - exact.gather(1, tokens[:, None])[:, 0]).abs().max().item(),
        "greedy": bool(tokens[2] == logits[2].argmax()),
        "repeats": bool(torch.equal(tokens, again)),
        "chi_square_z": (statistic - degrees) / (2 * degrees) ** 0.5,
        "cells": degrees,
    }


def limits(context: Context) -> dict:
    """Stop tokens end a completion and are part of it; length limits hold, also if each completion has its own; a
    prompt that is too long is an error."""
    from qerl.base.errors import EngineError

    engine = context.engine
    free = engine.generate(context.prompts[:4], context.greedy)
    stop = free[0].token_ids[5]
    stopped = engine.generate(
        context.prompts[:1], SamplingParams(max_new_tokens=64, temperature=0.0, stop_token_ids=(stop,))
    )[0]
    try:
        engine.generate([[5] * 1000], SamplingParams(max_new_tokens=25))
        message = None
    except EngineError as error:
        message = str(error)
    own = engine.generate(context.prompts[:2], [SamplingParams(3, 0.0), SamplingParams(9, 0.02)], seed=1)
    filtered = engine.generate(context.prompts[:8], SamplingParams(max_new_tokens=8, top_k=1, temperature=1.0), seed=1)
    return {
        "stop_reason": stopped.finish_reason,
        "stop_last": stopped.token_ids[-1] == stop and stop not in stopped.token_ids[:-1],
        "length_reason": free[1].finish_reason,
        "length": len(free[1].token_ids),
        "own_lengths": [len(completion.token_ids) for completion in own],
        "too_long": message,
        "top_k_1_logprob_zero": max(abs(v) for c in filtered for v in c.logprobs),
        "full_context_scored": len(engine.score([[5] * 1000], [[6] * 23])[0]),
    }
