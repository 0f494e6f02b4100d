"""What a run that trains through the quantizer keeps, found by its files. Importing this loads no torch.

base/                          the packed model that the run began with
checkpoints/step-*/weights/    the masters; a run that trains an adapter has its files in checkpoints/step-*/ instead
model/                         after the last step: the trained model, packed
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint import sealed
from qerl.checkpoint.adapter_file import ADAPTER_FILES

BASE, MODEL, WEIGHTS = "base", "model", "weights"
STEP = re.compile(r"step-(\d+)")

logger = logging.getLogger(__name__)


def through_quantizer(run: Path) -> bool:
    """Whether a run that has begun trains through the quantizer, so that its result is a packed model."""
    return (run / BASE).is_dir() or (run / MODEL).is_dir()


def trains_weights(run: Path) -> bool:
    """Whether it has no adapter: it trains whole weights, or has saved nothing yet."""
    return through_quantizer(run) and not sealed.adapters_of_run(run)


def export_line(run: Path) -> str:
    """The command that makes a model of such a run."""
    return f"qerl export --run {run}"


def model_of(run: Path) -> Path:
    """The trained model of a finished run. Raises CheckpointError, which says to export it, if it is not there."""
    folder = run / MODEL
    if not folder.is_dir():
        raise CheckpointError(
            f"{run} trains through the quantizer and has not finished, so that it has no model yet: write "
            f"`{export_line(run)}`, which makes one of its last checkpoint, and give that folder"
        )
    if damage := sealed.damage_of(folder, {"config.json"}):
        raise CheckpointError(
            f"{folder} is damaged ({damage}): write `qerl train --resume {run}`, which makes it anew, or "
            f"`{export_line(run)}`, and give that folder"
        )
    return folder


def checkpoint_of(run: Path, step: int | None = None) -> tuple[int, Path]:
    """(step, folder) of the newest checkpoint of a run whose masters or adapter are whole, or of that of `step`.

    Damaged ones are passed over with a warning. Raises CheckpointError if none is left, ConfigError for a `step` that
    was not saved.
    """
    trained = [*run.glob(f"checkpoints/*/{WEIGHTS}"), *run.glob(f"checkpoints/*/{ADAPTER_FILES[0]}")]
    named = ((STEP.fullmatch(path.parent.name), path.parent) for path in trained)
    found = dict(sorted((int(match[1]), path) for match, path in named if match))
    if not found:
        raise CheckpointError(
            f"{run} has saved no weights yet: let it reach its first checkpoint (run.save_every), or give another run"
        )
    if step is not None and step not in found:
        raise ConfigError(f"--step {step}: {run} has no checkpoint of it: give one of {', '.join(map(str, found))}")
    for one in [step] if step is not None else reversed(found):
        if (damage := _damage(found[one])) is None:
            return one, found[one]
        logger.warning("%s is damaged: %s", found[one], damage)
    raise CheckpointError(
        f"{run} has no checkpoint left that is whole: put the files back, or give another step or run"
    )


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with the masters or the adapter in a checkpoint; its other files are not read."""
    if (checkpoint / ADAPTER_FILES[0]).is_file():
        return sealed.adapter_damage(checkpoint)
    sums = sealed.read_sums(checkpoint) or {}
    names = [name for name in sums if name.startswith(f"{WEIGHTS}/")]
    return sealed.damage_of(checkpoint, (), names) if names else f"it has no {sealed.CHECKSUMS} that lists its weights"
