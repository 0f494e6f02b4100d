#!/usr/bin/env python3
"""Run a fixed set of small trainings on a CPU and write a digest of every number that they log or save.

    python3 scripts/checks/same_numbers.py --out before.json        # in the old checkout
    python3 scripts/checks/same_numbers.py --out after.json         # in the new one, on the same machine
    python3 scripts/checks/same_numbers.py --compare before.json after.json

Each run is `qerl train` in a process of its own, so the script depends on the command line alone and not on how the
code behind it is laid out. Times, speeds and memory are left out; everything else in metrics.jsonl, every logged
completion and every adapter tensor has to be equal to the bit. The numbers differ between kinds of CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

UNSTABLE = ("time/", "memory/", "speed/")
COMMON = (
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "run.save_every=2",
    "noise.num_stages=3", "data.limit=64", "optim.warmup_ratio=0", "logging.completions_every=1",
    "loss.mismatch_gate=null", "run.micro_batch_tokens=400",
)  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {
    "dapo": (),
    "dapo-bf16": ("model.format=bf16",),
    "dynamic-sampling": ("rollout.dynamic_sampling.enabled=true",),
    "noise-both": ("noise.where=both", "loss.correction.mode=sequence_truncate"),
    "iterations": ("loss.num_iterations=2", "loss.type=grpo", "loss.kl_coef=0.05", "loss.entropy_coef=0.01"),
    "gspo-norms": ("loss.type=grpo", "loss.level=sequence", "adapter.train_norms=true", "adapter.dropout=0.1"),
    "bnpo-off": ("loss.type=bnpo", "loss.correction.mode=off", "loss.mask_truncated=true", "noise.enabled=false"),
    "cispo-rewards": (
        "loss.type=cispo", "loss.clip_high=4.0", "loss.correction.mode=token_mask",
        "rewards=[{name: accuracy}, {name: format, weight: 0.2}, {name: soft_overlong}]",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        sys.exit(compare(*(json.loads(path.read_text(encoding="utf-8")) for path in arguments.compare)))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        qerl(work, "quantize", "--model", "tiny")
        found = {case: numbers_of(work, case, arguments.steps) for case in arguments.only}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def numbers_of(work: Path, case: str, steps: int) -> dict[str, str]:
    """{what it is: its digest or value} of one run."""
    run = work / case
    settings = [f"--set={setting}" for setting in (*COMMON, *CASES[case])]
    qerl(work, "train", "--recipe", "tiny", "--steps", str(steps), "--out", str(run), *settings)
    found = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found |= {f"step {row['step']} {key}": repr(row[key]) for key in row if not key.startswith(UNSTABLE)}
    for file in sorted([*run.glob("completions/*"), *run.glob("adapter/*.safetensors")]):
        found[str(file.relative_to(run))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def qerl(work: Path, *arguments: str) -> None:
    """Run one command of this checkout in `work`."""
    root = Path.cwd()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "qerl.cli.main", *arguments], cwd=work, env=environment, check=True)


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> int:
    """Print where the two differ; returns 1 if they do."""
    different = 0
    for case in before:
        old, new = before[case], after.get(case, {})
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        different += len(names)
        print(f"{case}: {len(old)} numbers, {len(names)} differ")
        for name in names[:5]:
            print(f"  {name}: {old.get(name)} -> {new.get(name)}")
    return int(different > 0)


if __name__ == "__main__":
    main()
