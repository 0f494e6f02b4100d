#!/usr/bin/env python3
"""The kernels around the products of a training step, at the sizes of a 7B model, against plain torch and their limits.

    python3 scripts/bench/bench_elementwise.py --out benchmarks/elementwise-7b.json

Times are microseconds per call. The limit is the time of a copy of as many bytes as have to be read and written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from qerl.model.costs import LOGIT_TOKENS
from scripts.bench.limits import copy_gb_per_s, seconds_of
from scripts.bench.provenance import command, machine, require_card

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3584, 18944, 28, 4, 128, 152064
Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8448)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_card()
    torch.manual_seed(0)
    rate, results = 1e9 * copy_gb_per_s(), {}
    print(f"{'':30}{'ours us':>10}{'limit us':>10}{'torch us':>10}")
    for name, needed, ours, plain in (*decoder(arguments.tokens), *head()):
        result = {"us": 1e6 * seconds_of(ours), "limit_us": 1e6 * needed / rate, "torch_us": 1e6 * seconds_of(plain)}
        results[name] = result
        print(f"{name:30}{result['us']:10.1f}{result['limit_us']:10.1f}{result['torch_us']:10.1f}")
    if arguments.out:
        report = {"command": command(), **machine(), "torch": torch.__version__}
        report |= {"gb_per_s": rate / 1e9, "results": results}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def decoder(tokens: int) -> Iterator[tuple[str, int, Call, Call]]:
    """The parts of a decoder layer: name, bytes, our call, the call in plain torch."""
    from qerl.model import kernels, twins

    stream, weight = random(tokens, 1, HIDDEN, dtype=torch.float32), random(HIDDEN)
    grad, delta, skip = (random(tokens, 1, HIDDEN) for _ in range(3))
    half, narrow = grad.nbytes, torch.bfloat16
    normed, _ = kernels.norm_forward(stream, weight, 1e-6, None, narrow)

    def both(function: str, *arguments: object) -> tuple[Call, Call]:
        ours, plain = getattr(kernels, function), getattr(twins, function)
        return lambda: ours(*arguments), lambda: plain(*arguments)

    # The residual stream is float32, twice `half`; what is kept of it, and gradients within a layer, are in 16 bits.
    yield "first norm", 4 * half, *both("norm_forward", stream, weight, 1e-6, None, narrow)
    yield "sum and second norm", 5 * half, *both("norm_forward", stream, weight, 1e-6, delta, narrow)
    yield "sum of the layer", 6 * half, *both("sum_three", stream, delta, skip)
    yield "second norm backward", 4 * half, *both("norm_backward", grad, normed, False, skip)
    yield "first norm backward", 5 * half, *both("norm_backward", grad, normed, False, skip, torch.float32)
    inner, outer = random(tokens, 2 * INTERMEDIATE), random(tokens, INTERMEDIATE)
    yield "SwiGLU", 3 * outer.nbytes, *both("swiglu_forward", inner)
    yield "SwiGLU backward", 6 * outer.nbytes, *both("swiglu_backward_", inner, outer)
    del inner, outer
    qkv = random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    cos, sin = random(tokens, HEAD_DIM), random(tokens, HEAD_DIM)
    rotated = qkv[:, : HEADS + KV_HEADS]
    needed = 2 * rotated.numel() * 2 + cos.nbytes  # half of cos and of sin
    yield "rotary", needed, *both("rotate_", rotated, rotated, cos, sin, 1)


def head() -> Iterator[tuple[str, int, Call, Call]]:
    """The same for a chunk of logits."""
    from qerl.model import kernels

    logits = 3 * random(LOGIT_TOKENS, VOCABULARY, dtype=torch.float32)
    targets = torch.randint(VOCABULARY, (LOGIT_TOKENS,), device="cuda")
    measured = kernels.measure_logits(logits, targets, 1.0)
    rows = torch.arange(LOGIT_TOKENS, device="cuda")

    def plain_values() -> object:
        log_p = torch.log_softmax(logits, -1)
        return log_p[rows, targets], torch.linalg.vecdot(log_p.exp(), log_p)

    def plain_slope() -> object:
        p = torch.softmax(logits, -1)
        p[rows, targets] -= 1.0
        return p.bfloat16()

    yield "logprobs", logits.nbytes, lambda: kernels.measure_logits(logits, targets, 1.0), plain_values
    wanted = torch.bfloat16, False

    def slope() -> object:
        return kernels.slopes_of_logits(logits, targets, measured, 1.0, wanted)

    yield "slope of logprobs", logits.nbytes * 3 // 2, slope, plain_slope


if __name__ == "__main__":
    main()
