"""The adapter of a run or of a folder, once its files have been found whole. Importing this loads no torch."""

from __future__ import annotations

import logging
from pathlib import Path

from qerl.base.errors import CheckpointError
from qerl.checkpoint.links import check_links
from qerl.checkpoint.sealed import CHECKSUMS, adapter_damage, adapters_of_run
from qerl.checkpoint.weights_run import export_line, trains_weights

logger = logging.getLogger(__name__)


def adapter_of_run(run: Path) -> Path:
    """The adapter that a finished run wrote, or else that of its last checkpoint (`checkpoints/step-000040`).

    Damaged ones are passed over, with a warning. Raises CheckpointError if none is left.
    """
    if trains_weights(run):
        raise CheckpointError(
            f"{run} trains whole weights, or has saved nothing yet, and has no adapter: write "
            f"`{export_line(run)}`, which makes a model of it"
        )
    saved, damaged = adapters_of_run(run), []
    for folder in saved:
        if damage := adapter_damage(folder):
            damaged.append(f"{folder.relative_to(run)} is damaged ({damage})")
            continue
        for text in damaged:
            logger.warning("%s: %s; %s is taken instead", run, text, folder.relative_to(run))
        return whole_adapter(folder)
    if damaged:
        raise CheckpointError(
            f"{run} has no adapter left that is whole: {', '.join(damaged)}; put the files back, or give another run"
        )
    raise CheckpointError(
        f"{run} has saved no adapter yet: let it reach its first checkpoint, or give another run or its base"
    )


def whole_adapter(folder: Path) -> Path:
    """`folder`, if it holds an adapter whose files are there and undamaged; CheckpointError otherwise."""
    check_links(folder)
    if not (folder / "adapter_model.safetensors").is_file():
        raise CheckpointError(f"{folder} has an adapter_config.json but no adapter_model.safetensors: save it again")
    if damage := adapter_damage(folder):
        raise CheckpointError(
            f"{folder} is damaged ({damage}): give another checkpoint, or the run, whose newest whole adapter is then "
            f"taken; if you changed the file yourself, delete {CHECKSUMS} there"
        )
    return folder
