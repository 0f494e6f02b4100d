#!/usr/bin/env python3
"""What rounding activations to NVFP4 costs at the sizes of a 7B: in a decode step, and per call of a training step.

    python3 scripts/bench/bench_activations.py --out benchmarks/activations-7b.json

A decode step rounds four inputs per layer (of q/k/v, o, gate/up and down), which is timed in a CUDA graph of 28 layers.
The limit is the time of a copy of as many bytes as have to be read and written. For comparison there is the time in
which the packed weights of that step can be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from qerl.formats.cuda.timing import graph_us
from qerl.formats.nvfp4.activations import Activations
from scripts.bench.limits import copy_gb_per_s, seconds_of
from scripts.bench.provenance import command, machine, require_card

HIDDEN, INTERMEDIATE, LAYERS, TRAINED_TOKENS = 3584, 18944, 28, 8448
INPUTS = (HIDDEN, HIDDEN, HIDDEN, INTERMEDIATE)
WEIGHTS_GB = LAYERS * 233_046_016 * 9 / 16 / 1e9
KINDS = {"dynamic": Activations(), "static": Activations(256.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_card()
    torch.manual_seed(0)
    rate = 1e9 * copy_gb_per_s()
    weights_us, results = 1e15 * WEIGHTS_GB / rate, {}
    print(f"the weights of a decode step can be read in {weights_us:.0f} us")
    print(f"{'':28}{'us':>10}{'limit us':>10}{'share':>10}")
    for kind, rounds in KINDS.items():
        for tokens in arguments.tokens:
            inputs = [torch.randn(tokens, columns, device="cuda").bfloat16() for columns in INPUTS]
            us = graph_us([partial(rounds, x) for _ in range(LAYERS) for x in inputs])
            name, limit = f"{kind}, {tokens} tokens decoded", 1e6 * LAYERS * 4 * sum(x.numel() for x in inputs) / rate
            results[name] = {"us": us, "limit_us": limit, "share_of_weights": us / weights_us}
        for columns in (HIDDEN, INTERMEDIATE):
            x = torch.randn(TRAINED_TOKENS, columns, device="cuda").bfloat16()
            us, limit = 1e6 * seconds_of(partial(rounds, x)), 1e6 * 2 * x.nbytes / rate
            results[f"{kind}, {TRAINED_TOKENS} x {columns}"] = {"us": us, "limit_us": limit}
    for name, result in results.items():
        share = f"{result['share_of_weights']:9.1%}" if "share_of_weights" in result else ""
        print(f"{name:28}{result['us']:10.1f}{result['limit_us']:10.1f}{share:>10}")
    if arguments.out:
        report = {"command": command(), **machine(), "gb_per_s": rate / 1e9, "results": results}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
