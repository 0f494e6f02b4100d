"""The teacher that a recipe names: a whole 16-bit model. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.named_base import beside
from qerl.checkpoint.quantized_folder import quantized_from
from qerl.checkpoint.resolve import ModelRef, resolve_model
from qerl.checkpoint.weights_run import export_line, trains_weights

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig

BF16 = formats.BF16.name


def teacher_model(config: RunConfig, base: ModelRef) -> ModelRef:
    """What `distill.teacher` names, or the 16-bit model that the student's `base` is or was made from.

    Raises QerlError for a model that is not there or is no whole 16-bit one.
    """
    given = config.distill.teacher
    if given is None:
        return _own(base.base)
    found = resolve_model(given)
    if found.run is not None and trains_weights(found.run):
        raise ConfigError(_no_whole_model(given, "a run", export_line(found.run)))
    if found.adapter is not None:
        kind = "an adapter" if found.kind == "adapter" else "a run"
        raise ConfigError(_no_whole_model(given, kind, f"qerl merge --adapter {given}"))
    if formats.get(found.format).quantized:
        source = quantized_from(found.path)
        remedy = f"write distill.teacher: {source}" if source else "give the 16-bit model that it was made from"
        label = formats.get(found.format).label
        raise ConfigError(f"distill.teacher {given} holds {label} weights, and a teacher is a 16-bit model: {remedy}")
    return found


def teacher_beside(config: RunConfig, run: Path) -> RunConfig:
    """The recipe of a run that continues, whose teacher may be named by a path from where the run was started."""
    if config.distill is None or config.distill.teacher is None:
        return config
    distill = config.distill.model_copy(update={"teacher": beside(run, config.distill.teacher)})
    return config.model_copy(update={"distill": distill})


def _own(base: str) -> ModelRef:
    """The 16-bit model under a base, without the adapter that may lie on it."""
    try:
        return replace(resolve_model(base, BF16), adapter=None)
    except CheckpointError as error:
        raise ConfigError(
            f"distill.teacher is null, and the 16-bit model under {base} is not here ({error}): write "
            "distill.teacher: MODEL"
        ) from error


def _no_whole_model(given: str, kind: str, command: str) -> str:
    return (
        f"distill.teacher {given} is {kind}, and a teacher is a whole 16-bit model: write `{command} --to {BF16}` and "
        "give the folder that it makes"
    )
