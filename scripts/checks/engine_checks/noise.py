"""The noise of the norms: its size in the outputs, and that it is removed without a trace."""

from __future__ import annotations

import torch

from engine_checks.compare import same
from engine_checks.context import Context


def noise(context: Context) -> dict:
    """Noise acts even at sigma 1e-4 (by regression on outputs), changes samples, and is removed exactly."""
    engine = context.engine
    norms = {name: module for name, module in engine.found.gains.norms.items() if name.endswith("layernorm")}
    generator = torch.Generator("cuda").manual_seed(11)
    clean = {name: module.gain.clone() for name, module in engine.found.gains.norms.items()}
    name, module = next(iter(norms.items()))
    x = torch.randn(65536, module.gain.numel(), device="cuda", generator=generator).bfloat16()
    result = {}
    before = engine.generate(context.prompts[:8], context.sampling, seed=2)
    for sigma in (1e-2, 1e-3, 1e-4):
        vectors = {n: torch.randn(m.gain.shape, device="cuda", generator=generator) * sigma for n, m in norms.items()}
        engine.set_noise(None)
        reference = module.forward_native(x).float()
        count = engine.set_noise(vectors)
        moved = module.forward_native(x).float() - reference
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        estimate = (moved * unit).sum(0) / unit.pow(2).sum(0)
        correlation = torch.corrcoef(torch.stack([estimate, vectors[name]]))[0, 1].item()
        noisy = engine.generate(context.prompts[:8], context.sampling, seed=2)
        delta = torch.tensor(
            [
                a - b
                for p, q in zip(before, noisy, strict=True)
                for a, b in zip(p.logprobs[:1], q.logprobs[:1], strict=True)
            ]
        )
        result[f"{sigma:g}"] = {
            "count": count,
            "std_over_sigma": (estimate.std() / vectors[name].std()).item(),
            "correlation": correlation,
            "first_logprob_moved": delta.abs().mean().item(),
            "same_as_clean": same(before, noisy),
        }
    engine.set_noise(None)
    after = engine.generate(context.prompts[:8], context.sampling, seed=2)
    result["restored_bits"] = all(torch.equal(module.gain, clean[n]) for n, module in engine.found.gains.norms.items())
    result["restored_samples"] = same(before, after)
    return result
