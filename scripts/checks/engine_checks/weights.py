"""The kernels' layouts decode to the checkpoint, products with them are right, and noise of the norms is removed."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from engine_checks.compare import same
from engine_checks.context import Context


def dequantization(context: Context) -> dict:
    """The kernel layout decodes to the checkpoint in three ways.

    These are the policy's reading of a part, which is bit-exact; the torch twin's reading of the whole first layer,
    which is bit-exact too; and the values without the global scale that products use, which agree up to rounding.
    """
    from safetensors import safe_open

    from qerl.engine.vllm.policy import KernelLinear
    from qerl.formats.nvfp4 import kernel_layout, reference

    linears = {n: m for n, m in context.policy.named_modules() if isinstance(m, KernelLinear)}
    different, twin, unscaled, seconds, moved = {}, 0, 0, 0.0, 0
    for path in sorted(Path(context.arguments.model).glob("*.safetensors")):
        with safe_open(path, "pt", device="cuda") as handle:
            for key in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                name = key.removesuffix(".weight_packed")
                if not key.endswith(".weight_packed"):
                    continue
                tensors = [
                    handle.get_tensor(f"{name}.{leaf}")
                    for leaf in ("weight_packed", "weight_scale", "weight_global_scale")
                ]
                expected = reference.dequantize_unchecked(*tensors, torch.bfloat16)
                linear = linears.pop(name)
                wrong = _different_bits(linear.unpack(torch.bfloat16), expected)
                if wrong:
                    different[name] = wrong
                exact = linear.unscaled(torch.bfloat16)[0].float() / linear.kernel_weight.scale_factor / tensors[2]
                full = reference.dequantize_unchecked(*tensors, torch.float32)
                unscaled = max(unscaled, ((exact - full).abs().max() / full.abs().max()).item())
                if ".layers.0." in name and linear.row_start == 0:
                    rows = kernel_layout.dequantize(linear.kernel_weight, torch.bfloat16)[: linear.out_features]
                    twin += _different_bits(rows, expected)
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(5):
                    linear.unscaled(torch.bfloat16)[0]
                torch.cuda.synchronize()
                seconds += (time.perf_counter() - started) / 5
                moved += expected.nbytes + tensors[0].nbytes + tensors[1].nbytes
    return {
        "different": different,
        "missing": sorted(linears),
        "twin_different": twin,
        "unscaled_relative_error": unscaled,
        "gb_per_s": moved / seconds / 1e9 if seconds else 0,
    }


def _different_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def product(context: Context) -> dict:
    """The forward pass and the input gradient of fused parts, against the same products in float64."""
    from qerl.engine.vllm.policy import KernelLinear
    from qerl.formats.fp8 import reference
    from qerl.formats.fp8.linear import FP8Linear

    worst = {"forward": 0.0, "backward": 0.0}
    for name, module in context.policy.named_modules():
        if not isinstance(module, KernelLinear | FP8Linear) or ".layers.1." not in f".{name}.":
            continue
        x = torch.randn(2, 37, module.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = module(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        weight = module.unpack(torch.float32).double()
        if module.start is not None:
            weight = weight + module.start[1].double() @ module.start[0].double()
        bias = 0 if module.bias is None else module.bias.double()
        inputs = x.detach()
        if isinstance(module, FP8Linear) and module.rounds_input:
            inputs = reference.dequantize_input(*reference.quantize_input(inputs, module.scales))
        expected = inputs.double() @ weight.t() + bias
        worst["forward"] = max(worst["forward"], _relative(y, expected))
        worst["backward"] = max(worst["backward"], _relative(x.grad, grad.double() @ weight))
    return worst


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


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
