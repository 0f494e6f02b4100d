"""Run the commands that the documentation shows, on the model that ships with qerl, and write docs/recordings/*.txt.

Everything runs on a CPU in a fresh folder, without a network, in about two minutes:

    python scripts/record_docs.py             # all
    python scripts/record_docs.py plan doctor # those that need no other one before them

What differs from run to run is replaced: the folder, seconds, sizes of disks, dates. Everything else is as printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDINGS = ROOT / "docs" / "recordings"
EVAL = "--limit 200 --max-new-tokens 48 --batch-size 200"

SESSIONS = {  # file -> commands, in the order in which they build on one another
    "recipes": ["qerl recipes", "qerl recipes tasks", "qerl recipes copy tiny --out mine.yaml"],
    "plan": ["qerl plan --recipe dapo_7b --gpu 24 --set rollout.max_new_tokens=2048"],
    "plan-too-large": ["qerl plan --recipe dapo_32b --gpu 24"],
    "doctor": ["qerl doctor"],
    "errors": [
        "qerl train --recipe dapo_7 --dry-run",
        "qerl train --recipe tiny --set noise.sigma_strat=1e-2",
        "qerl train --recipe tiny --set num_generations=8",
        "qerl eval arith --model tiny --samples 4",
    ],
    "quantize": ["qerl quantize --model tiny"],
    "dry-run": ["qerl train --recipe tiny --dry-run"],
    "eval-before": [f"qerl eval arith --model checkpoints/tiny-NVFP4A16 {EVAL} --out evals/before"],
    "train": ["qerl train --recipe tiny --steps 12 --set run.save_every=6 --out runs/demo"],
    "warnings": [
        "qerl train --recipe tiny --steps 6 --set noise.num_stages=3 --set rollout.max_new_tokens=2 --out runs/short"
    ],
    "eval-checkpoints": [f"qerl eval arith --run runs/demo --checkpoints all {EVAL}"],
    "eval-after": [f"qerl eval arith --model runs/demo {EVAL} --out evals/after"],
    "compare": ["qerl compare evals/before evals/after"],
    "grade": ["qerl grade evals/after/completions.jsonl --task arith"],
    "report": ["qerl report runs/demo --before evals/before --after evals/after"],
    "merge-adapter": ["qerl merge --adapter runs/demo --to adapter"],
    "merge-bf16": ["qerl merge --adapter runs/demo --to bf16 --prompt-count 16 --max-new-tokens 48"],
    "merge-nvfp4": ["qerl merge --adapter runs/demo --to nvfp4 --prompt-count 16 --max-new-tokens 48"],
    "chat": [
        "echo 'Tom has 3 boxes with 12 pencils each. How many pencils are there?' | "
        "qerl chat --model merged/demo-bf16 --temperature 0 --max-new-tokens 48"
    ],
}

NUMBER = re.compile(  # what a machine's speed, its disk and the day decide
    r"(?<=s/step )\d+\.\d+|\b\d+(?:\.\d+)?(?= (?:s|seconds|min|tokens/s|GiB free)\b)|\b20\d{6}-\d{6}\b"
    r"|(?<=eval/arith-)[0-9a-f]{8}\b|\b20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*"
)
TIMED_ROW = re.compile(r"^ +(?:seconds|tokens a second|seconds a step) ")
VALUE = re.compile(r"\d+(?:\.\d+)?(?=\s|$)")


def normalised(text: str, folder: Path) -> str:
    """The output without what changes from run to run; tables keep their borders in line."""
    lines = []
    for line in text.splitlines():
        clean = line
        for place in (folder, ROOT, Path(sys.prefix)):
            clean = clean.replace(f"{place}/", "")
        clean = NUMBER.sub("N", clean)
        if TIMED_ROW.match(clean):
            clean = VALUE.sub(lambda found: "N".rjust(len(found[0])), clean)
        if clean.endswith("│"):
            clean = clean[:-1].ljust(len(line) - 1) + "│"
        lines.append(clean.rstrip())
    return "\n".join(lines)


def record(name: str, folder: Path) -> None:
    """Run one session and write its file."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    parts = []
    for command in SESSIONS[name]:
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode not in (0, 1, 2):
            sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}")
        status = f"\n(exit code {done.returncode})" if done.returncode else ""
        parts.append(f"$ {command}\n{normalised(done.stdout, folder)}{status}")
    (RECORDINGS / f"{name}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{name}.txt")


def main() -> None:
    names = sys.argv[1:] or list(SESSIONS)
    if unknown := [name for name in names if name not in SESSIONS]:
        sys.exit(f"there is no recording {unknown[0]}: write some of {', '.join(SESSIONS)}")
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            record(name, Path(folder))


if __name__ == "__main__":
    main()
