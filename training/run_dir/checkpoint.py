"""Checkpoints of a run. Each is written into a temporary folder and renamed, with a checksum for every file.

If the disk is full, older checkpoints are deleted to make room, so that no step is lost. The newest good checkpoint is
never touched.

runs/<name>/checkpoints/step-000040/
    adapter_config.json, adapter_model.safetensors    a standard PEFT folder, usable as it is (for a run that trains
                                                      whole weights: weights/, its masters)
    optimizer.pt, scheduler.pt, rng_state.pth, trainer_state.json
    kv_scales.json, carry_over.pt                     of runs that need them to go on
    checksums.json                                    written last; a folder without it is not a checkpoint
"""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from qerl.base.errors import CheckpointError
from qerl.base.files import fsync, in_one_step, refusal_of
from qerl.checkpoint import folder as sealed
from qerl.checkpoint.folder import ADAPTER_FILES, WEIGHTS

logger = logging.getLogger(__name__)

TRAINER_FILES = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
FILES = TRAINER_FILES.union(ADAPTER_FILES)
REFUSALS = (OSError, RuntimeError, SafetensorError)  # raised if a file cannot be written


def write_checkpoint(
    run_dir: Path, step: int, keep: int, write: Callable[[Path], None], best: int | None = None
) -> None:
    """Have `write` fill the folder of a checkpoint, then delete all but the last `keep` checkpoints and `best`.

    If the disk is full, the checkpoints before the newest good one are deleted first, `best` last. Raises
    CheckpointError if the files cannot be written; the newest good checkpoint stays as it was.
    """
    try:
        _write_or_make_room(run_dir, step, write, best)
    except REFUSALS as error:
        before = newest_checkpoint(run_dir)
        kept = f"{before.name} is untouched" if before else "there is none before it, and a resumed run begins anew"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written ({_reason(error)}); {kept}: free some disk space and "
            f"run `qerl train --resume {run_dir}`"
        ) from error
    for old in checkpoints(run_dir)[:-keep]:
        if checkpoint_step(old) != best:
            shutil.rmtree(old)


def _write_or_make_room(run_dir: Path, step: int, write: Callable[[Path], None], best: int | None) -> None:
    final = checkpoint_path(run_dir, step)
    try:
        _write(final, write)
        return
    except REFUSALS as error:
        if not _make_room(run_dir, step, _reason(error), best):
            raise
    _write(final, write)  # outside of `except`: the error keeps the half-written file open, and so its space in use


def _write(final: Path, write: Callable[[Path], None]) -> None:
    """Write a temporary folder and rename it once all of it is on the disk. A failure leaves nothing behind."""
    with in_one_step(final) as partial:
        write(partial)
        sealed.seal(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        fsync(final.parent)


def _reason(error: Exception) -> str:
    """Why a file could not be written. torch's writer does not name the system's reason, but where in its source it
    noticed."""
    in_torch = isinstance(error, RuntimeError) and re.search(r"inline_container|PytorchStreamWriter", str(error))
    return refusal_of(error) or ("the disk took only a part of a file" if in_torch else str(error))


def _make_room(run_dir: Path, step: int, reason: str, best: int | None) -> bool:
    """If the disk has no room for a checkpoint, delete those before the newest good one. True if any was deleted.

    The checkpoint of `best` goes only if there is no other: its adapter has a copy in the run's best/.
    """
    newest = newest_checkpoint(run_dir)
    older = [path for path in checkpoints(run_dir) if newest and checkpoint_step(path) < checkpoint_step(newest)]
    older = [path for path in older if checkpoint_step(path) != best] or older
    if not older:
        return False
    size = sum(file.stat().st_size for file in newest.rglob("*"))
    if shutil.disk_usage(run_dir).free > size:
        return False
    logger.warning(
        "the checkpoint of step %d does not fit on the disk (%s): %s deleted to make room; free some space",
        step,
        reason,
        ", ".join(path.name for path in older),
    )
    for path in older:
        shutil.rmtree(path)
    return True


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first, damaged ones included."""
    return list(sealed.checkpoints_of(run_dir).values())


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files all match their checksums. Damaged ones are named in a warning."""
    for path in reversed(checkpoints(run_dir)):
        if damage := damage_of(path):
            logger.warning("%s is skipped: %s", path, damage)
        else:
            return path
    return None


def checkpoint_step(path: Path) -> int:
    """The number of optimizer steps before a checkpoint."""
    return int(path.name.removeprefix("step-"))


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder; None if it is good."""
    of_weights = any(name.startswith(f"{WEIGHTS}/") for name in sealed.read_sums(folder) or {})
    return sealed.damage_of(folder, TRAINER_FILES if of_weights else FILES)
