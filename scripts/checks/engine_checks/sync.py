"""The sync: adapters, trained norms and whole weights reach the engine, and an update that does not fit raises."""

from __future__ import annotations

import time

import torch

from engine_checks.compare import compare, same
from engine_checks.context import Context
from qerl.checkpoint.adapter_file import linear_targets
from qerl.config.names import PROJECTIONS
from qerl.engine.update import AdapterUpdate, WeightsUpdate, deliver
from scripts.bench.watch import address

ALPHA = 16.0


def adapter(context: Context) -> dict:
    """An adapter with nonzero B reaches the engine: agreement, greedy agreement with the trainer, counts, time."""
    from qerl.checkpoint.adapter import adapter_scaling, adapter_tensors, attach_lora

    before = context.engine.generate(context.prompts[:8], context.greedy)
    model = attach_lora(context.policy, context.arguments.rank, ALPHA, linear_targets(context.policy, PROJECTIONS))
    generator = torch.Generator("cuda").manual_seed(7)
    tensors = adapter_tensors(model)
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor.data.normal_(0, 0.02, generator=generator)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        count = deliver(AdapterUpdate(tensors, adapter_scaling(model)), context.engine)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    completions = context.engine.generate(context.prompts, context.sampling, seed=3)
    greedy = context.engine.generate(context.prompts[:8], context.greedy)
    result = compare(context, completions, 1.0)
    changed = sum(a.token_ids != b.token_ids for a, b in zip(before, greedy, strict=True))
    result |= {"count": count, "sync_ms": sorted(times)[2], "changed": changed, "greedy": _greedy_gap(context, greedy)}
    result["errors"] = _adapter_errors(context, dict(tensors), adapter_scaling(model))
    for tensor in tensors.values():
        tensor.data.zero_()
    deliver(AdapterUpdate(tensors, 1.0), context.engine)
    after = context.engine.generate(context.prompts[:8], context.greedy)
    result["zero_adapter_restores"] = same(before, after)
    context.policy = model.unload()
    return result


@torch.no_grad()
def _greedy_gap(context: Context, completions: list) -> dict:
    """The engine's greedy tokens against the trainer's argmax in the same context: share equal, largest logit gap."""
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
    from qerl.base.errors import EngineError

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
            deliver(AdapterUpdate(case, scaling), context.engine)
            messages[name] = None
        except EngineError as error:
            messages[name] = str(error)
    return messages


def trained_norms(context: Context) -> dict:
    """Trained norm weights, even those finer than bfloat16, reach the engine's norms with the adapter and act there."""
    from qerl.checkpoint.adapter import adapter_scaling, adapter_tensors, attach_lora

    engine, generator = context.engine, torch.Generator("cuda").manual_seed(11)
    before = engine.generate(context.prompts, context.sampling, seed=3)
    own = {name: norm.detach().clone() for name, norm in context.policy.named_parameters() if "norm" in name}
    model = attach_lora(
        context.policy, context.arguments.rank, ALPHA, linear_targets(context.policy, PROJECTIONS), train_norms=True
    )
    tensors = adapter_tensors(model)
    norms = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for tensor in norms.values():
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        tensor.data.add_((0.05 * noise).to(tensor.dtype))
    count = deliver(AdapterUpdate(tensors, adapter_scaling(model)), engine)
    completions = engine.generate(context.prompts, context.sampling, seed=3)
    own_norms = {name: engine.found.gains.norms[name.removesuffix(".weight")] for name in norms}
    exact = all(torch.equal(own_norms[n].gain, t.detach().float() + own_norms[n].offset) for n, t in norms.items())
    result = compare(context, completions, 1.0) | {"norms": len(norms), "count": count, "expected": len(tensors)}
    result |= {"bits": exact, "same_as_before": same(before, completions)}
    context.policy = model.unload()
    with torch.no_grad():  # PEFT leaves the trained norms in the model, and the engine does not keep them
        for name, norm in own.items():
            context.policy.get_parameter(name).copy_(norm)
    factors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name not in norms}
    deliver(AdapterUpdate(factors, 1.0), engine)
    return result


def whole_weights(context: Context) -> dict:
    """Changed weights of every linear reach the tensors that the captured graphs and the trainer read, with the bytes
    of the reference on a CPU; the earlier ones come back. A kernel that cannot take them refuses."""
    from qerl.base.errors import EngineError

    linears = {name: context.policy.get_submodule(name) for name in context.engine.found.linears}
    before = context.engine.generate(context.prompts, context.sampling, seed=3)
    dense = {name: _dense(linear).cpu() for name, linear in linears.items()}
    generator = torch.Generator().manual_seed(13)
    changed = {name: _nudged(matrix, generator) for name, matrix in dense.items()}
    addresses = {name: address(linear) for name, linear in linears.items()}
    torch.cuda.synchronize()
    started = time.perf_counter()
    try:
        count = deliver(WeightsUpdate(changed), context.engine)
    except EngineError as error:
        return {"refused": str(error)}
    result = {"count": count, "expected": len(linears), "sync_s": time.perf_counter() - started}
    wanted = {name: _rounded(linear, changed[name]) for name, linear in linears.items()}
    result["different"] = [name for name in linears if not torch.equal(_dense(linears[name]).cpu(), wanted[name])]
    result["moved"] = [name for name in linears if address(linears[name]) != addresses[name]]
    completions = context.engine.generate(context.prompts, context.sampling, seed=3)
    result |= compare(context, completions, 1.0) | {"same_as_before": same(before, completions)}
    deliver(WeightsUpdate(dense), context.engine)
    result["restored"] = same(before, context.engine.generate(context.prompts, context.sampling, seed=3))
    return result


def _dense(linear: torch.nn.Linear) -> torch.Tensor:
    """The weight that acts, float32."""
    from qerl.formats.linear import PackedLinear

    return linear.unpack(torch.float32) if isinstance(linear, PackedLinear) else linear.weight.detach().float()


def _nudged(matrix: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other weights that are no larger than the largest, so that no block scale saturates."""
    largest = matrix.abs().max()
    step = 0.1 * largest * torch.randn(matrix.shape, generator=generator)
    return (matrix + step).clamp(-largest, largest)


def _rounded(linear: torch.nn.Linear, matrix: torch.Tensor) -> torch.Tensor:
    """What the linear has to hold for `matrix`, float32 on the CPU."""
    from qerl.formats.fp8.linear import FP8Linear
    from qerl.formats.fp8.reference import dequantize as dequantize_fp8
    from qerl.formats.fp8.reference import quantize as quantize_fp8
    from qerl.formats.linear import PackedLinear
    from qerl.formats.nvfp4 import reference

    if isinstance(linear, FP8Linear):
        return dequantize_fp8(*quantize_fp8(matrix, linear.scales), torch.float32)
    if not isinstance(linear, PackedLinear):
        return matrix.to(linear.weight.dtype).float()
    packed = reference.quantize(matrix, torch.tensor([linear.kernel_weight.global_scale]))
    return reference.dequantize(*packed, torch.float32)
