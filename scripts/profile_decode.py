#!/usr/bin/env python3
"""Where the time of a decode step goes: GPU kernels by name and the share of the step in which the GPU idles.

python3 scripts/profile_decode.py --model checkpoints/random-7b-NVFP4A16 --out profile.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPT_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.engine, arguments.prompt_tokens, arguments.new_tokens = "qerl", PROMPT_TOKENS, arguments.steps + 1
    from scripts.bench_rollout import open_qerl, versions

    generate, kernel = open_qerl(arguments)
    report = {"command": " ".join(sys.argv), "kernel": kernel, **versions(), "decode": {}}
    for count in arguments.sequences:
        report["decode"][str(count)] = profile(generate, count, arguments.steps)
    text = json.dumps(report, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    for count, entry in report["decode"].items():
        print(f"== {count} sequences: {entry['step_ms']:.3f} ms a step, GPU busy {entry['busy_ms']:.3f} ms")
        for row in entry["kernels"][:22]:
            print(f"   {row['us']:8.1f} us {row['calls']:7.1f} x  {row['name'][:110]}")


def profile(generate, count: int, steps: int) -> dict:
    import torch
    from torch.profiler import ProfilerActivity

    rng = random.Random(count)

    def run(new_tokens: int) -> float:
        prompts = [[rng.randint(1, 256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
        started = time.perf_counter()
        generate(prompts, new_tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    run(steps + 1)
    wall = run(steps + 1) - run(1)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as whole:
        run(steps + 1)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as first:
        run(1)
    rows = defaultdict(lambda: [0.0, 0.0])
    for sign, result in ((1, whole), (-1, first)):
        for event in result.key_averages():
            rows[event.key][0] += sign * event.device_time_total / steps
            rows[event.key][1] += sign * event.count / steps
    kernels = [{"name": k, "us": v[0], "calls": v[1]} for k, v in rows.items() if v[0] > 0]
    kernels.sort(key=lambda row: -row["us"])
    busy = sum(row["us"] for row in kernels) / 1000
    return {"step_ms": 1000 * wall / steps, "busy_ms": busy, "kernels": kernels[:60]}


if __name__ == "__main__":
    main()
