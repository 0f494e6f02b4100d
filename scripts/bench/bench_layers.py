#!/usr/bin/env python3
"""One decoder layer forward and backward: the layers of transformers and PEFT against ours and a floor; writes JSON.

    python3 scripts/bench/bench_layers.py --out benchmarks/layers-7b.json

The layer is that of Qwen2.5-7B with random NVFP4 weights in our own layout (`--narrow 16` divides its sizes, for a
machine without a GPU) and LoRA of rank 32, on one packed row of 640-token sequences. The floor is the time of the
layer's large products alone, forward and to the input, by cuBLAS on dense bfloat16 weights. Times are milliseconds, the
median of `--repeats`. "kept" is the MiB that live between forward and backward, "peak" the most above what was
allocated before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from scripts.bench.provenance import command, machine

SEQUENCE = 640
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--narrow", type=int, default=1, help="divide the layer's sizes")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    row, gradients = packed_row(arguments.tokens), []
    results = {"products alone": measure(floor(arguments), arguments.repeats)}
    for name, ours in (("transformers + PEFT", False), ("ours", True)):
        torch.manual_seed(0)
        policy = build_policy(arguments, ours)
        results[name] = measure(step(policy, row), arguments.repeats)
        gradients.append({key: p.grad.clone() for key, p in policy.named_parameters() if p.grad is not None})
        del policy
    stock, own = gradients
    results["ours"]["gradient_difference"] = max(((own[k] - stock[k]).norm() / stock[k].norm()).item() for k in stock)
    print(f"{'':22}{'ms':>10}{'over floor':>12}{'kept MiB':>10}{'peak MiB':>10}")
    for name, result in results.items():
        result["over_floor"] = result["ms"] / results["products alone"]["ms"]
        print(f"{name:22}{result['ms']:10.2f}{result['over_floor']:12.2f}", end="")
        print(f"{result['kept_mib']:10.0f}{result['peak_mib']:10.0f}")
    print(f"largest relative difference of a gradient: {results['ours']['gradient_difference']:.1e}")
    if arguments.out:
        report = {"command": command(), **machine(), "torch": torch.__version__, "results": results}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def packed_row(tokens: int):
    """A row of sequences that share no prompt, packed by `qerl.model.packing`."""
    from qerl.model.packing import pack

    rows = max(1, tokens // SEQUENCE)
    ids = torch.randint(0, 128, (rows, min(tokens, SEQUENCE)), device=DEVICE)
    return pack(ids, torch.ones_like(ids), ids.shape[1] - 1)


def build_policy(arguments: argparse.Namespace, ours: bool) -> nn.Module:
    """A one-layer model with LoRA: our layers, or if not `ours` those of transformers and PEFT on the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from qerl.checkpoint.adapter import attach_lora
    from qerl.model.layers import fuse_

    hidden, intermediate = 3584 // arguments.narrow, 18944 // arguments.narrow
    config = AutoConfig.for_model(
        "qwen2", vocab_size=128, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1,
        num_attention_heads=28, num_key_value_heads=4, initializer_range=0.02,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE).requires_grad_(False)
    layer = model.model.layers[0]
    for parent, leaves in (
        (layer.self_attn, "qkv"),
        (layer.self_attn, "o"),
        (layer.mlp, ("gate", "up")),
        (layer.mlp, ("down",)),
    ):
        place_fused_(parent, [f"{leaf}_proj" for leaf in leaves])
    if ours:
        fuse_(model)
    policy = attach_lora(model, arguments.rank, arguments.rank)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    for module in policy.modules():
        if not ours and hasattr(module, "lora_part"):
            module.lora_part = lambda: None
    return policy


def place_fused_(parent: nn.Module, leaves: list[str]) -> None:
    """Replace the leaves by linears over one tensor of random codes, in which all block scales are equal."""
    from qerl.formats.nvfp4 import slab_layout
    from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
    from qerl.formats.nvfp4.linear import KernelLinear

    linears = [getattr(parent, leaf) for leaf in leaves]
    rows, columns = sum(linear.out_features for linear in linears), linears[0].in_features
    packed = torch.randint(0, 256, (rows, columns // 2), device=DEVICE, dtype=torch.uint8)
    scales = torch.ones(rows, columns // 16, device=DEVICE).to(torch.float8_e4m3fn)
    weight, start = KernelWeight(QERL, *slab_layout.pack(packed, scales), rows, columns, 160.0), 0
    for leaf, linear in zip(leaves, linears, strict=True):
        setattr(parent, leaf, KernelLinear(weight, start, linear.out_features, linear.bias))
        start += linear.out_features


def step(policy: nn.Module, row) -> Callable[[], Callable[[], None]]:
    """A function that runs the forward pass and returns the backward pass."""
    from qerl.model.packed_attention import packed_attention_of

    model = policy.get_base_model()
    embedded = model.get_input_embeddings()(row.input_ids).requires_grad_()

    def forward() -> Callable[[], None]:
        with packed_attention_of(model), torch.autocast(DEVICE, torch.bfloat16):
            out = model.model(
                inputs_embeds=embedded, position_ids=row.position_ids, use_cache=False, sequences=row.sequences
            ).last_hidden_state
        return lambda: out.backward(torch.ones_like(out))

    return forward


def floor(arguments: argparse.Namespace) -> Callable[[], Callable[[], None]]:
    """The four products of the layer, as a forward pass that returns the backward pass."""
    hidden, intermediate = 3584 // arguments.narrow, 18944 // arguments.narrow
    shapes = [(hidden * 9 // 7, hidden), (hidden, hidden), (2 * intermediate, hidden), (hidden, intermediate)]
    tokens = max(1, arguments.tokens // SEQUENCE) * min(arguments.tokens, SEQUENCE)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    pairs = [(random(tokens, columns), random(rows, columns), random(tokens, rows)) for rows, columns in shapes]

    def forward() -> Callable[[], None]:
        for x, weight, _ in pairs:
            _ = x @ weight.t()
        return lambda: [grad @ weight for _, weight, grad in pairs] and None

    return forward


def measure(forward: Callable[[], Callable[[], None]], repeats: int) -> dict[str, float]:
    """Milliseconds, kept MiB and peak MiB, as the module docstring defines them."""
    on_gpu, times, kept, peak = DEVICE == "cuda", [], 0, 0
    for _ in range(repeats + 2):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        backward = forward()
        kept = torch.cuda.memory_allocated() - before if on_gpu else 0
        backward()
        del backward
        if on_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        times.append(time.perf_counter() - started)
    return {"ms": statistics.median(times[2:]) * 1e3, "kept_mib": kept / 2**20, "peak_mib": peak / 2**20}


if __name__ == "__main__":
    main()
