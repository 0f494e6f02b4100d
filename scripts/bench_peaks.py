#!/usr/bin/env python3
"""GPU memory while training and saving, resuming, and evaluating: three processes after one another; writes JSON.

    python3 scripts/bench_peaks.py --model checkpoints/random-7b-NVFP4A16 --cap-gib 24 --out benchmarks/peaks-7b.json

Each is `qerl` itself, on scripts/bench_step.py's workload: steps that are saved, killed before the last; that step
after a resume; an evaluation of the run's adapter on 64 rows. A peak is the driver's of the whole card, less what was
taken before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    from scripts.bench_step import add_options, machine, overrides

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(steps=3, new_tokens=256)
    arguments = parser.parse_args()
    report = {"command": " ".join(sys.argv), **machine(), "peak_gib": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = [part for value in [*overrides(arguments, folder), "run.save_every=1"] for part in ("--set", value)]
        run, memory = folder / "run", [] if arguments.cap_gib is None else ["--memory", f"{0.85 * arguments.cap_gib}"]
        until = run / "checkpoints" / f"step-{arguments.steps - 1:06d}"
        evaluate = ["eval", "gsm8k", "--model", run, "--data", folder / "rows.jsonl", "--max-new-tokens", 256, *memory]
        report["peak_gib"] = {
            "train and save": watch(["train", "--recipe", "dapo_7b", *sets], until),
            "resume": watch(["train", "--resume", run]),
            "evaluate": watch(evaluate),
        }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


def watch(command: list[object], until: Path | None = None) -> float:
    """Peak GiB of the card while `qerl <command>` runs, above what was taken before. Raises if it fails.

    The process is killed when the folder `until` is there, so that a run is left to resume.
    """
    from scripts.bench_step import PeakMemory, taken_gib

    before = taken_gib()
    with tempfile.TemporaryFile("w+") as output, PeakMemory() as peak:
        process = subprocess.Popen(
            [sys.executable, "-m", "qerl.cli", *map(str, command)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None and not (until and until.is_dir()):
            time.sleep(0.05)
        process.kill()
        process.wait()
        if not (until and until.is_dir()) and process.returncode:
            output.seek(0)
            raise RuntimeError(f"qerl {command[0]} failed: {output.read()[-3000:]}")
    return round(peak.gib - before, 2)


if __name__ == "__main__":
    main()
