"""Checkpoints of a run: written beside and renamed, each file with its checksum, the newest good one found again.

runs/<name>/checkpoints/step-000040/
    adapter_config.json, adapter_model.safetensors    the standard PEFT folder, usable as it is
    optimizer.pt, scheduler.pt, rng_state.pth, trainer_state.json
    checksums.json                                    written last: a folder without it is not a checkpoint
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.adapter import load_tensors_, read_adapter, save_adapter
from qerl.errors import CheckpointError

if TYPE_CHECKING:
    from peft import PeftModel

    from qerl.config import RunConfig
    from training.trainer import QerlTrainer

logger = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"


def write_checkpoint(trainer: QerlTrainer, run_dir: Path, config: RunConfig) -> Path:
    """Write the trainer's state at its current step; older checkpoints beyond `keep_checkpoints` go afterwards.

    Raises CheckpointError if the disk refuses; what was there before stays as it was.
    """
    step = trainer.state.global_step
    final = checkpoint_path(run_dir, step)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_adapter(trainer.model, partial)
        trainer._save_optimizer_and_scheduler(str(partial))
        trainer._save_rng_state(str(partial))
        trainer.state.save_to_json(str(partial / "trainer_state.json"))
        _seal(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _fsync(final.parent)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written ({error}); earlier ones are untouched: free some "
            f"disk space and run `qerl train --resume {run_dir}`"
        ) from error
    for old in checkpoints(run_dir)[: -config.run.keep_checkpoints]:
        shutil.rmtree(old)
    return final


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first, good or not."""
    return sorted(path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir())


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files all match their checksums; damaged ones are named in a warning."""
    for path in reversed(checkpoints(run_dir)):
        if damage := _damage(path):
            logger.warning("%s is skipped: %s", path, damage)
        else:
            return path
    return None


def checkpoint_step(path: Path) -> int:
    """The number of optimizer steps that a checkpoint has behind it."""
    return int(path.name.removeprefix("step-"))


def load_adapter_(policy: PeftModel, path: Path) -> None:
    """Copy a checkpoint's adapter into the policy."""
    tensors, _ = read_adapter(path)
    load_tensors_(policy, tensors)


def _seal(folder: Path) -> None:
    """Flush every file and write the checksums, last."""
    sums = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        sums[file.relative_to(folder).as_posix()] = _sha256(file)
        _fsync(file)
    target = folder / CHECKSUMS
    target.write_text(json.dumps(sums, indent=1), encoding="utf-8")
    _fsync(target)
    _fsync(folder)


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return f"it has no readable {CHECKSUMS}"
    for name, expected in sums.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if _sha256(file) != expected:
            return f"{name} does not match its checksum"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
