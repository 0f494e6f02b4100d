#!/usr/bin/env python3
"""GPU memory while training and saving, resuming, and evaluating, in three consecutive processes; writes JSON.

    python3 scripts/bench/bench_peaks.py --model checkpoints/random-7b-NVFP4A16 --cap-gib 24 \
        --out benchmarks/peaks-7b.json

Each process is `qerl` itself, on the workload of scripts/bench/bench_step.py: steps that are saved; the last of them
again, after a resume from the checkpoint before it; an evaluation of the run's adapter on 64 rows. A peak is what the
driver reports for the whole card, less what was taken before; `steps` has the memory that the run itself logged.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    from scripts.bench.bench_step import add_options, overrides
    from scripts.bench.provenance import command, machine, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(steps=3, new_tokens=256)
    arguments = parser.parse_args()
    report = {"command": command(), **machine(), "peak_gib": {}, "steps": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = [part for value in [*overrides(arguments, folder), "run.save_every=1"] for part in ("--set", value)]
        run = folder / "run"
        commands = {
            "train and save": ["train", "--recipe", "dapo_7b", *sets],
            "resume": ["train", "--resume", run / "checkpoints" / f"step-{arguments.steps - 1:06d}"],
            "evaluate": ["eval", "gsm8k", "--model", run, "--data", folder / "rows.jsonl", "--max-new-tokens", 256],
        }
        for name, command in commands.items():
            report["peak_gib"][name] = watch(command)
            if command[0] == "train":
                report["steps"][name] = step_memory(run)
            text = write(report, arguments.out)
    print(text)


def step_memory(run: Path) -> list[dict[str, float]]:
    """For each step, its number and the memory that the run logged: GiB, of the whole card by phase."""
    from training.run_dir.log import read_metrics

    rows = read_metrics(run)
    return [{key: value for key, value in row.items() if key == "step" or key.startswith("memory/")} for row in rows]


def watch(command: list[object]) -> float:
    """Peak GiB of the card while `qerl <command>` runs, above what was taken before. Raises if the command fails."""
    from scripts.bench.bench_step import PeakMemory, taken_gib

    before = taken_gib()
    with tempfile.TemporaryFile("w+") as output, PeakMemory() as peak:
        words = [sys.executable, "-m", "qerl.cli.main", *map(str, command)]
        if subprocess.run(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode:
            output.seek(0)
            raise RuntimeError(f"qerl {command[0]} failed: {output.read()[-3000:]}")
    return round(peak.gib - before, 2)


if __name__ == "__main__":
    main()
