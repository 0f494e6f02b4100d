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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qerl.base.errors import CheckpointError, counted
from qerl.base.files import in_one_step
from qerl.checkpoint.base_start import start_of_adapter
from qerl.checkpoint.folder import (
    ADAPTER_FILES,
    MODEL,
    adapter_damage,
    beside,
    damage_of,
    export_line,
    model_of_adapter,
    read_sums,
    seal,
)
from qerl.config.recipe import load_config
from qerl.report.read import sampling_text
from training.run_dir.checkpoint import checkpoint_path
from training.run_dir.checkpoint import damage_of as checkpoint_damage
from training.run_dir.folder import make_aside
from training.run_dir.log import read_metrics
from training.run_dir.verdict import Best, best_of, decisive, ending, shown, validations

if TYPE_CHECKING:
    from qerl.base.parallel import Parallel
    from qerl.config.schema import RunConfig


logger = logging.getLogger(__name__)

ADAPTER, BEST = "adapter", "best"
VALIDATION = "validation.json"
TENSORS = "adapter_model.safetensors"


def settle_result(run_dir: Path, step: int) -> Path:
    """Make adapter/ a copy of the one in the checkpoint of `step`; an earlier result is moved aside."""
    final, checkpoint = run_dir / ADAPTER, checkpoint_path(run_dir, step)
    if not _is_copy(final, checkpoint):
        partial = _copied(final, checkpoint)
        if final.exists():
            final.rename(make_aside(run_dir) / final.name)
        partial.rename(final)
    return final


def settle_best(run_dir: Path, best: Best | None, has_adapter: bool = True) -> Path | None:
    """Make best/ the adapter of the best validation; None if there is none, or if it cannot be made.

    A run that trains whole weights keeps the checkpoint alone. A best/ of another step is replaced. If nothing can
    replace it, because its run was taken up at an earlier step, it is moved aside.
    """
    if not has_adapter:
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
    from qerl.checkpoint.peft_folder import TrainedOn, complete_, name_bases_, plain_base, trained_on

    base = beside(final, model_of_adapter(folder)[0])
    if not config.kind.packs:
        origin, note = TrainedOn(base, config.model.format, start_of_adapter(folder)), ""
    else:
        origin, note = trained_on(base), _packed_note(final)
    if origin.start is not None:  # without this file the adapter would be taken for one of the base alone
        name_bases_(folder, origin, plain_base(origin) or base)
    try:
        complete_(folder, str(final), origin, config.model.trust_remote_code, note, config.kind.tag)
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
    from qerl.checkpoint.export import read_trained, write_trained

    final = run_dir / MODEL
    if damage_of(final, {"config.json"}) is None:
        return final
    with in_one_step(final) as partial:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write_trained(read_trained(run_dir, checkpoint_path(run_dir, step)), partial, device)
        seal(partial)
        if final.exists():
            final.rename(make_aside(run_dir) / final.name)
        partial.rename(final)
    return final


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands when `train` returns."""

    run_dir: Path
    adapter: Path | None  # the folder of the adapter, or of the model; None if it was stopped before its last step
    steps: int
    stopped_by: int | None = None  # the number of the signal that asked it to stop, if one did


def finished(run_dir: Path, steps: int, config: RunConfig, parallel: Parallel, ended: bool = False) -> TrainResult:
    """`_finish` by the rank that writes; the others only say where the run stands. `ended`: by a validation."""
    if parallel.first:
        return _finish(run_dir, steps, config)
    return TrainResult(run_dir, run_dir / ADAPTER if ended or steps >= config.run.steps else None, steps)


def _finish(run_dir: Path, steps: int, config: RunConfig) -> TrainResult:
    """Say how a run ended; after its last step, or one that validation made the last, its adapter is the result."""
    rows = read_metrics(run_dir)
    settle_best(run_dir, best_of(rows, config.validation), config.kind.has_adapter)
    if steps < config.run.steps and not ending(rows, config.validation, steps):
        logger.warning("stopped after step %d; continue with `qerl train --resume %s`", steps, run_dir)
        return TrainResult(run_dir, None, steps)
    final = settle_model(run_dir, steps) if config.kind.packs else None
    adapter = settle_result(run_dir, steps) if config.kind.has_adapter else None
    what = f"model in {final}" if final else f"adapter in {adapter}"
    logger.info("finished %s: %s; %s", counted(steps, "step"), _reward_text(rows, run_dir), what)
    if sampling := sampling_text(rows):
        logger.info("dynamic sampling: %s", sampling)
    _say_best(run_dir, rows, config)
    return TrainResult(run_dir, final or adapter, steps)


def _say_best(run_dir: Path, rows: Sequence[Mapping[str, Any]], config: RunConfig) -> None:
    best = best_of(rows, config.validation)
    if best is None:
        return
    where = f", adapter in {run_dir / BEST}" if (run_dir / BEST).is_dir() else ""
    if not config.kind.has_adapter:
        where = f", of which `{export_line(run_dir)} --step {best.step}` makes a model"
    logger.info("best validation: %s%s", best, where)
    first = validations(rows)[0]
    _, height = decisive([first], config.validation)
    if first["step"] == 0 and height(value := first[f"validation/{best.metric}"]) > height(best.value):
        logger.warning("before the first step it was better: %s", shown(best.metric, value))


def _reward_text(rows: Sequence[Mapping[str, Any]], run_dir: Path) -> str:
    for key, what in (("kl_to_teacher/forward", "KL to the teacher"), ("nll", "loss"), ("reward", "reward")):
        if values := [row[key] for row in rows if row.get(key) is not None]:
            fifth, form = max(1, len(values) // 5), ".3f" if key == "reward" else ".2g"
            first, last = (sum(part) / fifth for part in (values[:fifth], values[-fifth:]))
            if len(values) == 1:
                return f"{what} {first:{form}}"
            width = "step" if fifth == 1 else f"{fifth} steps"
            return f"mean {what} {first:{form}} in the first {width}, {last:{form}} in the last"
    if any("reward" in row for row in rows):
        return "no completion had a reward, since every reward function returned None"
    return f"its metrics are gone ({run_dir / 'metrics.jsonl'} holds no reward)"
