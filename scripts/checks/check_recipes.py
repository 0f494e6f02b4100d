#!/usr/bin/env python3
"""Random recipes on an embedded model: each one runs, resumes to the same bits, and logs numbers that can be.

    python3 scripts/checks/check_recipes.py --minutes 10 --seed 0

A recipe takes one entry of each row of CHOICES; where the rules of the configuration refuse the combination, another
one is drawn. Every run has STEPS steps and is then resumed from its middle in a copy. It finds what no test of one
feature does: a curriculum over several sources once took the rows of the last source for all of them.

Prints the recipes with a mistake, and ends with status 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STEPS, MIDDLE = 4, 2
REWARD = '''
def digits(completions, **columns):
    """The share of characters that are digits, which differs between completions of any model."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]
'''
WEIGHTS = {"a": 2, "b": 1}
SOURCES = (
    "[{name: a, weight: 2, source: ROWS}, {name: b, weight: 1, source: ROWS, "
    "rewards: [{name: accuracy}, {name: length, weight: 0.5}, {name: soft_overlong, args: {cache: 1}}]}]"
)
MIXED = ("data.source=null", f"data.sources={SOURCES}", "data.held_out=4", "validation.every=3")
COMMON = (
    *("rollout.prompts_per_step=3", "rollout.group_size=4", "rollout.max_new_tokens=8", "noise.num_stages=3"),
    *("noise.sigma_start=0.05", "noise.sigma_end=0.01", "optim.warmup_ratio=0", "loss.mismatch_gate=null"),
    f"run.save_every={MIDDLE}",
)
SEQUENCE = ("loss.level=sequence", "loss.clip_low=3e-4", "loss.clip_high=4e-4")
CHOICES: Sequence[Sequence[Sequence[str]]] = (
    [["loss.type=grpo"], ["loss.type=dr_grpo"], ["loss.type=bnpo"], ["loss.type=sapo"], ["loss.type=vespo"], []],
    [[], [], ["loss.type=grpo", *SEQUENCE], ["loss.type=luspo", *SEQUENCE], ["loss.type=cispo", "loss.clip_high=5"]],
    [["loss.num_iterations=2"], [], []],
    [["loss.kl_coef=0.1"], ["loss.kl_coef=0.1", "loss.kl_unbiased=false"], [], []],
    [["loss.entropy_coef=0.01"], [], []],
    [[f"loss.correction.mode={mode}"] for mode in ("token_mask", "sequence_mask", "sequence_truncate")] + [[]],
    [["loss.advantage_scale=batch"], ["loss.advantage_scale=none"], []],
    [["loss.mask_truncated=true"], ["loss.mask_truncated=false"]],
    [["rollout.max_new_tokens=1"], ["rollout.max_new_tokens=3"], [], []],
    [["rollout.dynamic_sampling.enabled=true"], ["rollout.carry_over=1"], [], []],
    [["rollout.top_p=0.7"], ["rollout.temperature=0.5", "rollout.top_k=5"], ["rollout.temperature=2.0"], []],
    [["adapter.dropout=0.2"], [], []],
    [["adapter.train_norms=true"], [], []],
    [["noise.enabled=false"], ["noise.where=both"], []],
    [["data.curriculum=true"], [], []],
    [
        ["data.source=null", f"data.sources={SOURCES}", "data.held_out=4", "validation.every=3"],
        ["environment={name: word_game, max_turns: 2}"],
        [],
        [],
    ],
    [["validation.every=2", "validation.limit=4", "validation.task=word_game"], [], []],
    [["run.micro_batch_tokens=64"], []],
    [["model.base=tiny_experts"], ["qat.mode=weights"], ["qat.mode=adapter"], ["model.format=bf16"], []],
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the recipes that are drawn")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    chosen, until = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    runs = wrong = 0
    while time.monotonic() < until:
        overrides = [override for row in CHOICES for override in chosen.choice(row)]
        with tempfile.TemporaryDirectory() as folder:
            if (found := checked(overrides, Path(folder))) is None:
                continue
        runs += 1
        wrong += bool(found)
        for mistake in found:
            print(f"{mistake}\n    {overrides}", flush=True)
    print(f"{runs} recipes ran, {wrong} of them with a mistake")
    return int(wrong > 0)


def checked(overrides: Sequence[str], folder: Path) -> list[str] | None:
    """What is wrong with a run of these overrides; None if they cannot be combined."""
    from qerl.base.errors import QerlError
    from qerl.config.recipe import load_recipe
    from qerl.data.tasks import get_task
    from qerl.report.metrics import deterministic
    from training.run import resume, start
    from training.run_dir.log import read_metrics

    rows, reward = folder / "rows.jsonl", folder / "reward.py"
    rows.write_text("".join(json.dumps(row) + "\n" for row in islice(get_task("arith").generate("train"), 40)))
    reward.write_text(REWARD)
    given = [f"data.source={rows}", f"rewards=[{{name: '{reward}:digits'}}]"]
    given += [override.replace("ROWS", str(rows)) for override in overrides]
    try:
        config = load_recipe("tiny", [*COMMON, *given], steps=STEPS, out=str(folder / "run"))
    except QerlError:
        return None
    try:
        run_dir = start(config, "tiny").run_dir
        whole = [deterministic(row) for row in read_metrics(run_dir)]
        shutil.copytree(run_dir, folder / "again")
        resume(folder / "again", step=MIDDLE)
    except QerlError as error:  # refused by the model or the data
        return None if not (folder / "run" / "metrics.jsonl").exists() else [str(error)]
    except Exception:
        return [traceback.format_exc(limit=-3)]
    return mistakes(whole, [deterministic(row) for row in read_metrics(folder / "again")], config)


def mistakes(whole: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]], config: Any) -> list[str]:
    """What the metrics of a run, and of the same run resumed, show to be wrong."""
    found = []
    for one, other in zip(whole, again, strict=True):
        differing = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        if differing:
            found.append(f"step {one['step']}: resumed, it has another {', '.join(differing[:4])}")
        for key, value in one.items():
            if value is not None and key.endswith("share") and not -1e-6 <= value <= 1 + 1e-6:
                found.append(f"step {one['step']}: {key} is {value}")
            if value is not None and key in ("kl", "update_kl", "mismatch_kl", "entropy") and value < -1e-6:
                found.append(f"step {one['step']}: {key} is {value}")
    rollouts = [row for row in whole if "sources/a/share" in row]
    prompts = config.rollout.prompts_per_step
    for name, weight in WEIGHTS.items() if rollouts else ():
        taken = prompts * sum(row[f"sources/{name}/share"] for row in rollouts)
        due = prompts * len(rollouts) * weight / sum(WEIGHTS.values())
        if abs(taken - due) > 1:
            found.append(f"source {name} has {taken:g} prompts, and by its weight {due:g}")
    return found


if __name__ == "__main__":
    sys.exit(main())
