"""What a run offers beside its checkpoints.

    adapter/    the adapter after the last step         model/    of a run through the quantizer, the packed model
    best/       the adapter of the best validation; its validation.json says of which step it is

An adapter is a copy of a checkpoint's, with checksums and with what plain PEFT needs. Everything is written beside its
place and then renamed.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qerl.base.errors import CheckpointError
from qerl.checkpoint.adapter_file import (
    ADAPTER_FILES,
    MODEL,
    adapter_damage,
    damage_of,
    read_sums,
    seal,
    trains_weights,
)
from qerl.checkpoint.base_start import start_of_adapter
from qerl.checkpoint.export import read_trained, write_trained
from qerl.checkpoint.folder import beside, model_of_adapter
from qerl.checkpoint.peft_folder import TrainedOn, complete_, name_bases_, plain_base, trained_on
from qerl.config.recipe import load_config
from training.run_dir.checkpoint import checkpoint_path
from training.run_dir.checkpoint import damage_of as checkpoint_damage
from training.run_dir.folder import make_aside
from training.validation.verdict import Best

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


logger = logging.getLogger(__name__)

ADAPTER, BEST = "adapter", "best"
VALIDATION = "validation.json"
TENSORS = "adapter_model.safetensors"


def settle_result(run_dir: Path, step: int) -> Path:
    """Make adapter/ that of the checkpoint of `step`; an earlier result is moved aside."""
    final, checkpoint = run_dir / ADAPTER, checkpoint_path(run_dir, step)
    if not _is_copy(final, checkpoint):
        partial = _copied(final, checkpoint)
        if final.exists():
            final.rename(make_aside(run_dir) / final.name)
        partial.rename(final)
    return final


def settle_best(run_dir: Path, best: Best | None) -> Path | None:
    """Make best/ that of the best validation; None if there is none, or if it cannot be made.

    A run that trains whole weights keeps the checkpoint alone. A best/ of another step is replaced. If nothing can
    replace it, because its run was taken up at an earlier step, it is moved aside.
    """
    if trains_weights(run_dir):
        return None
    final = run_dir / BEST
    checkpoint = None if best is None else checkpoint_path(run_dir, best.step)
    if checkpoint is not None and _best_in(final) == asdict(best) and _is_copy(final, checkpoint):
        return final
    if checkpoint is None or checkpoint_damage(checkpoint):
        if final.exists():
            aside = make_aside(run_dir)
            final.rename(aside / final.name)
            logger.warning("%s is not of the best validation that the run has now: it is in %s", final, aside)
        return None
    try:
        partial = _copied(final, checkpoint, {VALIDATION: json.dumps(asdict(best))})
    except OSError as error:
        logger.warning("%s could not be written (%s): take %s", final, error.strerror, checkpoint)
        return None
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    return final


def _copied(final: Path, checkpoint: Path, texts: dict[str, str] | None = None) -> Path:
    """A complete and sealed copy of a checkpoint's adapter, beside where it will be, and files with these texts."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
    partial.mkdir()
    for name in ADAPTER_FILES:
        shutil.copy(checkpoint / name, partial / name)
    if (config := final.parent / "config.yaml").is_file():
        _complete_(partial, final, load_config(config))
    for name, text in (texts or {}).items():
        (partial / name).write_text(text, encoding="utf-8")
    seal(partial)
    return partial


def _complete_(folder: Path, final: Path, config: RunConfig) -> None:
    """Add what plain PEFT needs. The base is not needed for the adapter itself, so that its absence is a warning.

    What an adapter through the quantizer is added to are the 16-bit weights.
    """
    base = beside(final, model_of_adapter(folder)[0])
    if config.qat is None:
        origin, note = TrainedOn(base, config.model.format, start_of_adapter(folder)), ""
    else:
        origin, note = trained_on(base), _packed_note(final)
    if origin.start is not None:  # without this file the adapter would be taken for one of the base alone
        name_bases_(folder, origin, plain_base(origin) or base)
    try:
        complete_(folder, str(final), origin, config.model.trust_remote_code, note)
    except CheckpointError as error:
        logger.warning("%s has neither tokenizer nor card: %s", final, error)


def _packed_note(final: Path) -> str:
    return (
        "It was trained through the quantizer: what was sampled from is the 16-bit model with the adapter in it, "
        f"packed. `qerl export --run {final.parent}` writes that model; without rounding the adapter acts a little "
        "differently."
    )


def _is_copy(final: Path, checkpoint: Path) -> bool:
    """Whether a folder is whole and has the checkpoint's tensors, as far as the checkpoint is still there."""
    if not all((final / name).is_file() for name in ADAPTER_FILES) or adapter_damage(final):
        return False
    ours, theirs = read_sums(final), read_sums(checkpoint)
    return theirs is None or ours is None or ours.get(TENSORS) == theirs.get(TENSORS)


def _best_in(folder: Path) -> object:
    try:
        return json.loads((folder / VALIDATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def settle_model(run_dir: Path, step: int) -> Path:
    """Make RUN/model of the checkpoint of `step`, unless it is there and whole; a damaged one is moved aside.

    Raises CheckpointError, and leaves nothing behind, if the checkpoint cannot be packed.
    """
    final, partial = run_dir / MODEL, run_dir / f".{MODEL}.partial"
    if damage_of(final, {"config.json"}) is None:
        return final
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
    partial.mkdir()
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write_trained(read_trained(run_dir, checkpoint_path(run_dir, step)), partial, device)
        seal(partial)
        if final.exists():
            final.rename(make_aside(run_dir) / final.name)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
