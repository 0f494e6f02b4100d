"""Evaluate several checkpoints of one run in one call: the base is loaded once, and the adapters are exchanged.

`qerl eval gsm8k --run runs/a --checkpoints all` (or `last`, or steps: `40,80`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from eval.result import EvalResult
from eval.run import EngineHolder, OnBatch, run_eval
from eval.settings import EvalSettings
from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.files import no_folder
from qerl.base.parallel import ALONE, Parallel
from qerl.checkpoint.adapter_file import export_line, through_quantizer
from qerl.checkpoint.folder import kind_of

logger = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d+)")  # how training names its checkpoints


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Folders of the run's checkpoints by step, in order. Raises CheckpointError if there are none."""
    if not os.path.isdir(run):
        raise CheckpointError(f"--run {run}: {no_folder(str(run))}: give one that `qerl train` made (runs/NAME)")
    if kind_of(run) != "run":
        raise CheckpointError(f"--run {run} is no run directory: give one that `qerl train` made (runs/NAME)")
    if through_quantizer(run):
        raise CheckpointError(
            f"--run {run} trains through the quantizer, so that its checkpoints are no adapters beside a base: write "
            f"`{export_line(run)} --step STEP`, and give the folder that it makes as --model; the finished run itself "
            "is taken as --model too"
        )
    named = ((STEP.fullmatch(file.parent.name), file.parent) for file in run.glob("checkpoints/*/adapter_config.json"))
    found = dict(sorted((int(match[1]), folder) for match, folder in named if match))
    if not found:
        raise CheckpointError(f"{run} has no checkpoint yet: let it reach run.save_every steps, or give another run")
    return found


def choose(found: dict[int, Path], asked: str) -> dict[int, Path]:
    """The checkpoints asked for: `all`, `last`, or steps `40,80`. Raises ConfigError, which names those that exist."""
    if asked == "all":
        return found
    if asked == "last":
        return dict([max(found.items())])
    parts = [part.strip() for part in asked.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or int(part) not in found]
    if wrong:
        raise ConfigError(
            f"--checkpoints {asked!r}: there is no checkpoint {wrong[0]!r}; write all, last, or steps of "
            f"{', '.join(map(str, found))}"
        )
    return {step: found[step] for step in sorted(map(int, parts))}


def run_checkpoints(
    settings: EvalSettings, on_batch: OnBatch | None = None, parallel: Parallel = ALONE
) -> list[EvalResult]:
    """Evaluate checkpoints of a run (--run, --checkpoints) in the order of their steps; finished ones are only read.

    With --out, each has its own folder in it. Raises QerlError as `run_eval` does.
    """
    chosen = choose(checkpoints_of(settings.run), settings.checkpoints or "all")
    whole = replace(settings, run=None, checkpoints=None, model=str(settings.run))
    results = []
    with contextlib.closing(EngineHolder()) as holder:
        for step, folder in chosen.items():
            logger.info("checkpoint of step %d", step)
            out = None if settings.out is None else settings.out / folder.name
            one = replace(whole, adapter=str(folder), out=out, step=step)
            results.append(run_eval(one, on_batch, holder, parallel))
    return results
