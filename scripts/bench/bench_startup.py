#!/usr/bin/env python3
"""Seconds of a first and a second start of the engine, by part; writes JSON for benchmarks/.

    python3 scripts/bench/bench_startup.py --model checkpoints/random-7b-NVFP4A16 --out benchmarks/startup-7b.json

Each start is a process of its own. All starts share cache folders, which are empty before the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CACHES = ("VLLM_CACHE_ROOT", "HUMMING_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "QERL_CACHE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--caches", type=Path, help="folder for the caches; default: a new one")
    parser.add_argument("--once", action="store_true", help="open the engine here and print its seconds")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(start(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.caches or Path(folder)
        environment = {name: str(root / name.lower()) for name in CACHES}
        starts = [run(environment) for _ in range(arguments.starts)]
    from scripts.bench.provenance import command, machine, write

    report = {"command": command(), **machine(), "starts": starts, **ratios(starts)}
    print(write(report, arguments.out))


def start(arguments: argparse.Namespace) -> dict:
    """Open the engine as training does, and return its seconds."""
    from qerl.checkpoint.folder import format_of
    from qerl.engine.options import EngineOptions
    from qerl.engine.vllm.engine import VLLMEngine

    sizes = {"max_context": arguments.context, "max_rank": arguments.rank, "max_sequences": arguments.sequences}
    options = EngineOptions(**sizes)
    engine = VLLMEngine(arguments.model, format_of(Path(arguments.model)).name, options)
    return {"startup_s": engine.startup_s, "kernel": engine.kernel}


def run(environment: dict[str, str]) -> dict:
    """One start in a process of its own: what it prints, and its total time including Python's imports."""
    command = [sys.executable, *sys.argv, "--once"]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}, check=True)
    return {"process_s": round(time.monotonic() - started, 1), **json.loads(done.stdout.splitlines()[-1])}


def ratios(starts: list[dict]) -> dict[str, float]:
    """How many times faster the last start was than the first: the engine alone, and the whole process."""
    first, last = starts[0], starts[-1]
    engine = [sum(each["startup_s"].values()) for each in (first, last)]
    return {
        "engine_first_over_last": round(engine[0] / engine[1], 2),
        "process_first_over_last": round(first["process_s"] / last["process_s"], 2),
    }


if __name__ == "__main__":
    main()
