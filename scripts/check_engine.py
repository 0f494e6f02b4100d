#!/usr/bin/env python3
"""Check on this card that the vllm engine and the trainer's model over its tensors agree; prints one JSON object.

    python3 scripts/check_engine.py --model checkpoints/random-7b-NVFP4A16 [--kernel marlin] [--deterministic]

Each check gives numbers; tests/test_qerl_engine_vllm.py runs this on small models and holds the bars.
A check that raises is reported and the rest still run; exit code 1 if any raised.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import random
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from qerl.engine import SamplingParams
from qerl.engine_vllm import VLLMEngine

RANK, ALPHA = 8, 16.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--format", default="nvfp4", choices=("nvfp4", "bf16"))
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--tune", action="store_true", help="measure the ways to multiply first")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--cap-gib", type=float)
    parser.add_argument("--memory", type=float, help="rollout.memory: GiB, or a share")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--only", nargs="*", help="names of the checks to run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a check counts as hung")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.patience, exit=True)
    context = Context(arguments)
    report = context.report
    for check in CHECKS if not arguments.only else [*CHECKS, *ON_REQUEST]:
        if arguments.only and check.__name__ not in arguments.only:
            continue
        faulthandler.dump_traceback_later(arguments.patience, exit=True)
        started = time.monotonic()
        try:
            report[check.__name__] = check(context)
        except Exception:
            report["failed"].append(check.__name__)
            report[check.__name__] = {"error": traceback.format_exc(limit=-6)}
        report["seconds"][check.__name__] = round(time.monotonic() - started, 2)
    text = json.dumps(report, indent=1)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(1 if report["failed"] else 0)


class Context:
    """The engine, its policy model, and the prompts that all checks share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        started = time.monotonic()
        self.arguments = arguments
        self.engine = self.open()
        self.report = {
            "model": arguments.model,
            "kernel": self.engine.kernel,
            "open_s": round(time.monotonic() - started, 1),
            "startup_s": self.engine.startup_s,
            "compiled_from_cache": self.engine.compiled_from_cache,
            "ways": ways(),
            "cache_tokens": self.engine.cache_tokens,
            "gpu": torch.cuda.get_device_name(),
            "failed": [],
            "seconds": {},
        }
        self.policy = self.engine.policy_model()
        rng = random.Random(1)
        length = lambda: rng.randint(16, 128)  # noqa: E731 - one line
        self.prompts = [[rng.randint(1, 256) for _ in range(length())] for _ in range(arguments.prompts)]
        self.sampling = SamplingParams(max_new_tokens=arguments.new_tokens)
        self.greedy = SamplingParams(max_new_tokens=arguments.new_tokens, temperature=0.0)

    def open(self) -> VLLMEngine:
        arguments = self.arguments
        return VLLMEngine(
            arguments.model,
            arguments.format,
            kernel=arguments.kernel,
            deterministic=arguments.deterministic,
            tune_kernels=arguments.tune,
            kv_cache_dtype=arguments.kv_cache_dtype,
            max_context=1024,
            max_rank=arguments.rank,
            cap_gib=arguments.cap_gib,
            memory=arguments.memory,
            max_sequences=128,
        )


def ways() -> dict[str, tuple[str, ...]]:
    """How each quantized shape multiplies at each of `qerl.nvfp4.ways.TOKENS`."""
    from qerl.vllm_plugin.products import BASES

    return {base.shape.name: base.ways for base in BASES.values()}


def shared_memory(context: Context) -> dict:
    """Every parameter of the policy lies inside a tensor of the engine; the base is counted once."""
    from qerl.vllm_plugin.policy import KernelLinear

    engine_storages = _storages(context.engine._model)
    foreign, linears = [], 0
    for name, parameter in context.policy.named_parameters():
        if parameter.untyped_storage().data_ptr() not in engine_storages:
            foreign.append(name)
    for name, module in context.policy.named_modules():
        if isinstance(module, KernelLinear):
            linears += 1
            pointers = {
                tensor.untyped_storage().data_ptr()
                for tensor in (module.kernel_weight.words, module.kernel_weight.scales)
            }
            if not pointers <= set(engine_storages):
                foreign.append(name)
    bias_bytes = sum(
        module.bias.nbytes
        for module in context.policy.modules()
        if isinstance(module, KernelLinear) and module.bias is not None
    )
    files = sum(path.stat().st_size for path in Path(context.arguments.model).glob("*.safetensors"))
    return {
        "foreign": [name for name in foreign if not name.endswith(".bias")],
        "kernel_linears": linears,
        "engine_gib": sum(engine_storages.values()) / 2**30,
        "checkpoint_gib": files / 2**30,
        "bias_mib_held_twice": bias_bytes / 2**20,
    }


def _storages(model: torch.nn.Module) -> dict[int, int]:
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.untyped_storage()
        if tensor.is_cuda:
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def dequantization(context: Context) -> dict:
    """The kernel layout decodes to the checkpoint bit-exactly: Triton, and its torch twin on the first layer."""
    from safetensors import safe_open

    from qerl.nvfp4 import kernel_layout, reference
    from qerl.vllm_plugin.policy import KernelLinear

    linears = {n: m for n, m in context.policy.named_modules() if isinstance(m, KernelLinear)}
    different, twin, unscaled, seconds, moved = {}, 0, 0, 0.0, 0
    for path in sorted(Path(context.arguments.model).glob("*.safetensors")):
        with safe_open(path, "pt", device="cuda") as handle:
            for key in handle.keys():  # noqa: SIM118 - no mapping
                name = key.removesuffix(".weight_packed")
                if not key.endswith(".weight_packed"):
                    continue
                tensors = [
                    handle.get_tensor(f"{name}.{leaf}")
                    for leaf in ("weight_packed", "weight_scale", "weight_global_scale")
                ]
                expected = reference.dequantize_unchecked(*tensors, torch.bfloat16)
                linear = linears.pop(name)
                wrong = _different_bits(linear._dequantize(torch.bfloat16), expected)
                if wrong:
                    different[name] = wrong
                exact = linear.unscaled().float() / linear.kernel_weight.scale_factor / tensors[2]
                full = reference.dequantize_unchecked(*tensors, torch.float32)
                unscaled = max(unscaled, ((exact - full).abs().max() / full.abs().max()).item())
                if ".layers.0." in name and linear.row_start == 0:
                    rows = kernel_layout.dequantize(linear.kernel_weight, torch.bfloat16)[: linear.out_features]
                    twin += _different_bits(rows, expected)
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(5):
                    linear.unscaled()
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
    """Forward and input gradient of a fused part against the same product in float64."""
    from qerl.vllm_plugin.policy import KernelLinear

    worst = {"forward": 0.0, "backward": 0.0}
    for name, module in context.policy.named_modules():
        if not isinstance(module, KernelLinear) or ".layers.1." not in f".{name}.":
            continue
        x = torch.randn(2, 37, module.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = module(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        weight = module._dequantize(torch.float32).double()
        bias = 0 if module.bias is None else module.bias.double()
        expected = x.detach().double() @ weight.t() + bias
        worst["forward"] = max(worst["forward"], _relative(y, expected))
        worst["backward"] = max(worst["backward"], _relative(x.grad, grad.double() @ weight))
    return worst


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


def agreement(context: Context) -> dict:
    """Sampling logprobs against the policy's, and `score` against both."""
    completions = context.engine.generate(context.prompts, context.sampling, seed=3)
    return _compare(context, completions, temperature=1.0) | {"lengths": sum(len(c.token_ids) for c in completions)}


def temperature(context: Context) -> dict:
    """The same at temperature 0.7 with top-k off: logprobs are of the distribution that was sampled from."""
    sampling = SamplingParams(max_new_tokens=32, temperature=0.7)
    completions = context.engine.generate(context.prompts[:8], sampling, seed=3)
    return _compare(context, completions, temperature=0.7)


def _compare(context: Context, completions: list, temperature: float) -> dict:
    prompts = context.prompts[: len(completions)]
    sampled = [c.logprobs for c in completions]
    trained = policy_logprobs(context.policy, prompts, [c.token_ids for c in completions], temperature)
    scored = context.engine.score(prompts, [c.token_ids for c in completions], temperature)
    return {"policy": _mismatch(sampled, trained), "score": _mismatch(sampled, scored)}


@torch.no_grad()
def policy_logprobs(model, prompts: list, completions: list, temperature: float = 1.0) -> list[list[float]]:
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion]], device="cuda")
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
        picked = torch.log_softmax(logits, -1).gather(1, tokens[0, len(prompt) :, None])
        rows.append(picked[:, 0].tolist())
    return rows


def _mismatch(sampled: list, trained: list) -> dict:
    a = torch.tensor([v for row in sampled for v in row], dtype=torch.float64)
    b = torch.tensor([v for row in trained for v in row], dtype=torch.float64)
    ratio = b - a
    return {
        "mean_abs": ratio.abs().mean().item(),
        "max_abs": ratio.abs().max().item(),
        "kl": (ratio.exp() - ratio - 1).mean().item(),
    }


def oracle(context: Context) -> dict:
    """Sampler, `score` and policy against transformers in float32 on the checkpoint's own tensors."""
    from qerl.model import load_model

    prompts = context.prompts[:8]
    completions = context.engine.generate(prompts, context.sampling, seed=9)
    tokens = [c.token_ids for c in completions]
    policy = policy_logprobs(context.policy, prompts, tokens)
    score = context.engine.score(prompts, tokens)
    exact_model = load_model(context.arguments.model, context.arguments.format, "float32", "cuda")
    exact = policy_logprobs(exact_model, prompts, tokens)
    del exact_model
    gc.collect()
    torch.cuda.empty_cache()
    sampled = [c.logprobs for c in completions]
    return {"sampled": _mismatch(sampled, exact), "policy": _mismatch(policy, exact), "score": _mismatch(score, exact)}


def repeat(context: Context) -> dict:
    """Share of greedy completions that a repeated call reproduces token by token and bit by bit."""
    engine = context.engine
    first = engine.generate(context.prompts, context.greedy)
    warm = engine.generate(context.prompts, context.greedy)
    engine._llm.reset_prefix_cache()
    cold = engine.generate(context.prompts, context.greedy)
    engine._llm.reset_prefix_cache()
    cold2 = engine.generate(context.prompts, context.greedy)
    seeds = [engine.generate(context.prompts, context.sampling, seed=s) for s in (5, 5, 6)]
    return {
        "warm_prefix_cache": _same(first, warm),
        "cold": _same(first, cold),
        "cold_again": _same(cold, cold2),
        "same_seed": _same(seeds[0], seeds[1]),
        "other_seed": _same(seeds[0], seeds[2]),
        "distinct_within_call": len(
            {tuple(c.token_ids) for c in engine.generate([context.prompts[0]] * 8, context.sampling, seed=1)}
        ),
    }


def _same(a: list, b: list) -> dict:
    return {
        "tokens": sum(x.token_ids == y.token_ids for x, y in zip(a, b, strict=True)) / len(a),
        "logprobs": sum(x.logprobs == y.logprobs for x, y in zip(a, b, strict=True)) / len(a),
    }


def adapter(context: Context) -> dict:
    """A trained-looking adapter reaches the engine: agreement, greedy agreement with the trainer, counts, time."""
    from qerl.adapter import adapter_scaling, adapter_tensors, attach_lora

    before = context.engine.generate(context.prompts[:8], context.greedy)
    model = attach_lora(context.policy, context.arguments.rank, ALPHA)
    generator = torch.Generator("cuda").manual_seed(7)
    tensors = adapter_tensors(model)
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor.data.normal_(0, 0.02, generator=generator)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        count = context.engine.sync_adapter(tensors, adapter_scaling(model))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    completions = context.engine.generate(context.prompts, context.sampling, seed=3)
    greedy = context.engine.generate(context.prompts[:8], context.greedy)
    result = _compare(context, completions, 1.0)
    changed = sum(a.token_ids != b.token_ids for a, b in zip(before, greedy, strict=True))
    result |= {"count": count, "sync_ms": sorted(times)[2], "changed": changed, "greedy": _greedy_gap(context, greedy)}
    result["errors"] = _adapter_errors(context, dict(tensors), adapter_scaling(model))
    for tensor in tensors.values():
        tensor.data.zero_()
    context.engine.sync_adapter(tensors, 1.0)
    after = context.engine.generate(context.prompts[:8], context.greedy)
    result["zero_adapter_restores"] = _same(before, after)
    context.policy = model.unload()
    return result


@torch.no_grad()
def _greedy_gap(context: Context, completions: list) -> dict:
    """Engine's greedy tokens under the trainer's argmax of the same context: share equal, and the largest logit gap."""
    equal, total, gap = 0, 0, 0.0
    for prompt, completion in zip(context.prompts, completions, strict=False):
        tokens = torch.tensor([[*prompt, *completion.token_ids]], device="cuda")
        logits = context.policy(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        gap = max(gap, (logits.max(-1).values - chosen).max().item())
        equal += int((logits.argmax(-1) == tokens[0, len(prompt) :]).sum())
        total += len(completion.token_ids)
    return {"equal_tokens": equal / total, "largest_gap": gap}


def _adapter_errors(context: Context, tensors: dict, scaling: float) -> dict:
    from qerl.errors import EngineError

    some = next(iter(tensors))
    broken = {
        "missing_one": {k: v for k, v in tensors.items() if k != some},
        "unknown": {
            **tensors,
            "model.layers.99.mlp.up_proj.lora_A.weight": tensors[some],
            "model.layers.99.mlp.up_proj.lora_B.weight": tensors[some],
        },
        "shape": {**tensors, some: tensors[some][:, :-16]},
        "rank": {k: torch.cat([v] * 2, dim=0 if ".lora_A." in k else 1) for k, v in tensors.items()},
        "layer": {k: v for k, v in tensors.items() if ".layers.1." not in k},
    }
    messages = {}
    for name, case in broken.items():
        try:
            context.engine.sync_adapter(case, scaling)
            messages[name] = None
        except EngineError as error:
            messages[name] = str(error)
    return messages


def noise(context: Context) -> dict:
    """Noise acts at sigma 1e-4 (regressed from outputs), changes samples, and is restored bit-exactly."""
    engine = context.engine
    norms = {name: module for name, module in engine._norms.items() if name.endswith("layernorm")}
    generator = torch.Generator("cuda").manual_seed(11)
    clean = {name: module.gain.clone() for name, module in engine._norms.items()}
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
            "same_as_clean": _same(before, noisy),
        }
    engine.set_noise(None)
    after = engine.generate(context.prompts[:8], context.sampling, seed=2)
    result["restored_bits"] = all(torch.equal(module.gain, clean[n]) for n, module in engine._norms.items())
    result["restored_samples"] = _same(before, after)
    return result


def sleep_and_wake(context: Context) -> dict:
    """Sleeping gives back the KV cache only; sampling goes on afterwards with the same result."""
    from qerl.vllm_plugin.sleep import kv_cache_bytes

    engine = context.engine
    before = engine.generate(context.prompts[:8], context.greedy)
    pointers = sorted(_storages(engine._model))
    used = _used_gib()
    times = []
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.sleep()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - started) * 1e3)
    asleep = _used_gib()
    logprobs = policy_logprobs(context.policy, context.prompts[:1], [[5, 6, 7]])
    gc.collect()
    started = time.perf_counter()
    engine.wake()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - started) * 1e3)
    after = engine.generate(context.prompts[:8], context.greedy)
    return {
        "used_gib": used,
        "asleep_gib": asleep,
        "awake_gib": _used_gib(),
        "kv_gib": kv_cache_bytes() / 2**30,
        "sleep_ms": times[0],
        "wake_ms": times[1],
        "same_pointers": pointers == sorted(_storages(engine._model)),
        "policy_works_asleep": len(logprobs[0]) == 3,
        "same": _same(before, after),
    }


def _used_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def trained_norms(context: Context) -> dict:
    """Trained norm weights, below bfloat16's grid too, reach the engine's norms with the adapter and act there."""
    from qerl.adapter import adapter_scaling, adapter_tensors, attach_lora

    engine, generator = context.engine, torch.Generator("cuda").manual_seed(11)
    before = engine.generate(context.prompts, context.sampling, seed=3)
    model = attach_lora(context.policy, context.arguments.rank, ALPHA, train_norms=True)
    tensors = adapter_tensors(model)
    norms = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for tensor in norms.values():
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        tensor.data.add_((0.05 * noise).to(tensor.dtype))
    count = engine.sync_adapter(tensors, adapter_scaling(model))
    completions = engine.generate(context.prompts, context.sampling, seed=3)
    gains = {name: module.gain for name, module in engine._norms.items()}
    exact = all(torch.equal(gains[n.removesuffix(".weight")], t.detach().float()) for n, t in norms.items())
    result = _compare(context, completions, 1.0) | {"norms": len(norms), "count": count, "expected": len(tensors)}
    result |= {"bits": exact, "same_as_before": _same(before, completions)}
    context.policy = model.unload()
    return result


def exhausted_cache(context: Context) -> dict:
    """More tokens at once than the KV cache holds: the rollout shrinks its concurrency, finishes, and says so."""
    engine, sampling = context.engine, SamplingParams(max_new_tokens=960)
    prompts = [[5 + index] * 32 for index in range(128)]
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("qerl.engine_vllm").addHandler(handler)
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=960, stop_token_ids=()), seed=3)
    stopped = sum(completion.finish_reason == "stop" for completion in completions)
    short = _compare_some(context, prompts[:16], completions[:16])
    tokens = sum(len(prompt) + len(c.token_ids) for prompt, c in zip(prompts, completions, strict=True))
    return {
        "cache_tokens": engine.cache_tokens,
        "tokens": tokens,
        "completions": len(completions),
        "stopped": stopped,
        "full": sum(len(c.token_ids) == sampling.max_new_tokens for c in completions),
        "warned": [message for message in messages if "KV cache" in message],
        "policy": short,
    }


def reopened(context: Context) -> dict:
    """An engine that was closed gives its memory back, and the process opens another: evaluation of several bases."""
    from vllm.device_allocator.cumem import CuMemAllocator

    before = context.engine.generate(context.prompts[:8], context.greedy)
    open_gib = _used_gib()
    context.policy = None
    context.engine.close()
    left = CuMemAllocator.get_instance().get_current_usage()
    context.engine = context.open()
    after = context.engine.generate(context.prompts[:8], context.greedy)
    context.policy = context.engine.policy_model()
    return {"left_bytes": left, "open_gib": open_gib, "again_gib": _used_gib(), "same": _same(before, after)}


def _compare_some(context: Context, prompts: list, completions: list) -> dict:
    trained = policy_logprobs(context.policy, prompts, [completion.token_ids for completion in completions])
    return _mismatch([completion.logprobs for completion in completions], trained)


def sampler(context: Context) -> dict:
    """The fused sampler against torch: frequencies of 200,000 draws, logprobs, seeds, greedy."""
    from qerl.vllm_plugin.sampling import draw

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
    """Stop tokens end a completion and are part of it; lengths are kept; too long a prompt is an error."""
    from qerl.errors import EngineError

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
    filtered = engine.generate(context.prompts[:8], SamplingParams(max_new_tokens=8, top_k=1, temperature=1.0), seed=1)
    return {
        "stop_reason": stopped.finish_reason,
        "stop_last": stopped.token_ids[-1] == stop and stop not in stopped.token_ids[:-1],
        "length_reason": free[1].finish_reason,
        "length": len(free[1].token_ids),
        "too_long": message,
        "top_k_1_logprob_zero": max(abs(v) for c in filtered for v in c.logprobs),
        "full_context_scored": len(engine.score([[5] * 1000], [[6] * 23])[0]),
    }


CHECKS = [
    shared_memory,
    dequantization,
    product,
    limits,
    agreement,
    temperature,
    oracle,
    repeat,
    noise,
    sleep_and_wake,
    adapter,
    trained_norms,
    sampler,
]
ON_REQUEST = [exhausted_cache, reopened]  # with --only

if __name__ == "__main__":
    main()
