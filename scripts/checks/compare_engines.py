#!/usr/bin/env python3
"""Train the embedded model with both rollout engines on one GPU, and compare the reward curves; writes JSON.

    python3 scripts/checks/compare_engines.py --out benchmarks/engines-tiny.json [--steps 30] [--seeds 0 1]
        [--set KEY=VALUE]

Each run is a process of its own (`qerl train --recipe tiny`), and all run at the same time. The rewards of the two
engines should differ only by sampling noise: `difference` is the difference of their mean rewards over the last third
of the steps, with its standard error from the number of completions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("vllm", "transformers")
SHOWN = ("reward", "entropy", "mismatch_kl", "noise/sigma", "grad_norm", "time/step_s", "time/rollout_s", "time/sync_s")


def main() -> None:
    from scripts.bench.provenance import command, machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--memory-gib", type=float, default=8, help="budget of each vllm engine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `qerl train`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        qerl(work, "quantize", "--model", "tiny").wait()
        runs = {(engine, seed): train(work, engine, seed, arguments) for engine in ENGINES for seed in arguments.seeds}
        codes = {key: process.wait() for key, process in runs.items()}
        report = {
            "command": command(),
            **machine(),
            "runs": [result(work, engine, seed, codes[engine, seed]) for engine, seed in runs],
        }
    report["difference"] = difference(report["runs"], arguments.steps)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)
    sys.exit(max(codes.values()))


def train(work: Path, engine: str, seed: int, arguments: argparse.Namespace) -> subprocess.Popen:
    settings = [f"--set=rollout.engine={engine}", *(f"--set={value}" for value in arguments.set)]
    if engine == "vllm":
        # Marlin, because Humming compiles into a cache that processes cannot share while they start.
        settings += [f"--set=rollout.memory={arguments.memory_gib}", "--set=rollout.kernel=marlin"]
    out = work / f"{engine}-{seed}"
    options = ["--steps", str(arguments.steps), "--seed", str(seed), "--out", str(out)]
    return qerl(work, "train", "--recipe", "tiny", *options, *settings, log=out.with_suffix(".log"))


def qerl(work: Path, *arguments: str, log: Path | None = None) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    output = None if log is None else log.open("w")
    return subprocess.Popen(
        [sys.executable, "-m", "qerl.cli.main", *arguments], cwd=work, env=environment, stdout=output, stderr=output
    )


def result(work: Path, engine: str, seed: int, code: int) -> dict:
    folder = work / f"{engine}-{seed}"
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    tail = folder.with_suffix(".log").read_text()[-1500:] if code else ""
    steps = {name: [row.get(name) for row in rows] for name in SHOWN}
    return {"engine": engine, "seed": seed, "exit_code": code, "log": tail, **steps}


def difference(runs: list[dict], steps: int) -> dict:
    """The mean reward of the last third by engine, the difference of the means, and its standard error."""
    last = {engine: [] for engine in ENGINES}
    for run in runs:
        last[run["engine"]] += run["reward"][-max(1, steps // 3) :]
    means = {engine: sum(values) / len(values) for engine, values in last.items() if values}
    if len(means) < len(ENGINES):
        return {}
    completions = 64  # per step of the tiny recipe
    variance = sum(means[e] * (1 - means[e]) / (completions * len(last[e])) for e in ENGINES)
    return {"last_third": means, "difference": means["vllm"] - means["transformers"], "stderr": math.sqrt(variance)}


def show(report: dict) -> None:
    for run in report["runs"]:
        rewards = [f"{value:.2f}" for value in run["reward"]]
        print(f"{run['engine']:13} seed {run['seed']} exit {run['exit_code']}: {' '.join(rewards)}")
        if run["log"]:
            print(run["log"])
    print(report["difference"])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
