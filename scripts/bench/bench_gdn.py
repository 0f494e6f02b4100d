#!/usr/bin/env python3
"""The recurrence of linear attention on a card: fla-core's gradients against our twin, speed and memory; writes JSON.

    pip install fla-core==0.6.0 && python3 scripts/bench/bench_gdn.py --out gdn.json

Shapes are those of Qwen3.5-9B and 27B. Packed rows hold sequences whose boundaries are off the kernels' grid of 64
tokens. Gradients are those of all inputs and of the states that sequences begin with; errors are |found - exact| /
|exact|, where exact is the twin in float32 on the same 16-bit inputs. `repeats` says whether a second call gives the
same bits, and `first_s` has the compiling. On Hopper with Triton 3.4 to 3.7.0 our products are in the backward pass
(`products_backward`), or with --tilelang TileLang's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHAPES = {"9b": (16, 32), "27b": (16, 48)}  # key heads, value heads; each of 128
DIM = 128
LENGTHS = [1, 63, 64, 65, 200, 777]  # of the sequences whose gradients are compared
TOKENS = (4096, 8192, 16384, 32768)
NAMES = ("q", "k", "v", "g", "beta", "begin")


def main() -> None:
    from qerl.model import gated_delta
    from scripts.bench.provenance import command, machine, require_card, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--tilelang", action="store_true", help="TileLang's kernel in the backward pass, not ours")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_card()
    report: dict[str, Any] = {"command": command(), **machine(), "shapes": {}}
    if arguments.tilelang:
        gated_delta.register_products = lambda: None
    for shape, heads in SHAPES.items():
        found = {"errors": errors(heads), "speed": [speed(heads, tokens) for tokens in arguments.tokens]}
        report["shapes"][shape] = found
        print(shape, json.dumps(found, indent=1))
        write(report, arguments.out)


def inputs_of(heads: tuple[int, int], lengths: list[int], dtype: Any) -> tuple[list[Any], Any]:
    """q, k, v, g, beta and the states to begin with, which want gradients; and where the sequences begin."""
    import torch

    generator, (keys, values), tokens = torch.Generator("cuda").manual_seed(0), heads, sum(lengths)
    options = {"generator": generator, "device": "cuda"}
    q, k, v = (torch.randn(tokens, n, DIM, **options).to(dtype) for n in (keys, keys, values))
    g, beta = -0.1 * torch.rand(tokens, values, **options), torch.rand(tokens, values, **options)
    begin = torch.randn(len(lengths), values, DIM, DIM, **options)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return [each.requires_grad_() for each in (q, k, v, g, beta, begin)], starts


def gradients(rule: Any, inputs: list[Any], starts: Any, seed: int = 1) -> dict[str, Any]:
    """Results and gradients of a fixed random function of them, in float32, by name."""
    import torch

    out, states = rule(tuple(inputs[:5]), starts, inputs[5])
    generator = torch.Generator("cuda").manual_seed(seed)
    weights = [torch.randn(each.shape, generator=generator, device="cuda") for each in (out, states)]
    loss = (out.float() * weights[0]).sum() + (states * weights[1]).sum()
    found = torch.autograd.grad(loss, inputs)
    named = {"out": out, "states": states} | {f"d{name}": grad for name, grad in zip(NAMES, found, strict=True)}
    return {name: tensor.detach().float() for name, tensor in named.items()}


def errors(heads: tuple[int, int]) -> dict[str, Any]:
    import torch

    from qerl.model.gated_delta import delta_rule, delta_rule_twin

    inputs, starts = inputs_of(heads, LENGTHS, torch.bfloat16)
    begun = time.perf_counter()
    found = gradients(delta_rule, inputs, starts)
    torch.cuda.synchronize()
    first, again = time.perf_counter() - begun, gradients(delta_rule, inputs, starts)
    exact_inputs = [each.detach().float().requires_grad_() for each in inputs]
    exact = gradients(delta_rule_twin, exact_inputs, starts)
    relative = {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    repeats = all(torch.equal(tensor, again[name]) for name, tensor in found.items())
    return {"first_s": round(first, 1), "repeats": repeats} | {name: f"{each:.2e}" for name, each in relative.items()}


def speed(heads: tuple[int, int], tokens: int, repeats: int = 10) -> dict[str, Any]:
    """Milliseconds of a forward pass and of both, for sequences of 100 to 1,000 tokens, and GiB at the peak."""
    import torch

    from qerl.model.gated_delta import delta_rule

    lengths, generator = [], torch.Generator().manual_seed(tokens)
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(torch.randint(100, 1001, (1,), generator=generator))))
    inputs, starts = inputs_of(heads, lengths, torch.bfloat16)

    def forward() -> Any:
        return delta_rule(tuple(inputs[:5]), starts, inputs[5])

    def both() -> None:
        out, states = forward()
        torch.autograd.grad((out.float().sum() + states.sum()), inputs)

    times = {}
    for name, call in (("forward_ms", forward), ("both_ms", both)):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begun = torch.cuda.memory_allocated(), time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        times[name] = round(1e3 * (time.perf_counter() - begun) / repeats, 3)
        times[name.replace("_ms", "_gib")] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    return {"tokens": tokens, "sequences": len(lengths), **times}


if __name__ == "__main__":
    main()
