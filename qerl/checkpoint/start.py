"""The model that a run begins with: the base of an adapter, or the 16-bit weights that become masters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.errors import ConfigError
from qerl.checkpoint.named_base import beside
from qerl.checkpoint.quantized_folder import quantized_from
from qerl.checkpoint.resolve import ModelRef, resolve_base_of_run, resolve_model
from qerl.checkpoint.weights_run import export_line

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


def starting_model(config: RunConfig, run: Path | None = None) -> ModelRef:
    """What `model.base` names, for a new run or for one that continues in `run`; its format is that of the engine.

    Raises QerlError for a model that is not there, or that this kind of training cannot start from.
    """
    base, format = config.model.base, config.model.format
    if config.qat is None:
        return resolve_model(base, format) if run is None else resolve_base_of_run(base, format, run)
    found = resolve_model(base if run is None else beside(run, base))
    if found.kind == "base16":
        return replace(found, format=format)
    if found.kind == "quantized":
        source = quantized_from(found.path)
        remedy = f"write model.base: {source}" if source else "give the 16-bit model that it was made from"
        label = formats.get(found.format).label
        raise ConfigError(
            f"model.base {base} is already quantized ({label}), and qat trains 16-bit weights, since small updates "
            f"vanish between the values of {label}: {remedy}"
        )
    command = f"qerl merge --adapter {base}" if found.adapter else export_line(found.path)
    raise ConfigError(
        f"model.base {base} is {'an adapter' if found.kind == 'adapter' else 'a run'}, and qat starts from a whole "
        f"16-bit model: write `{command} --to {formats.BF16.name}` and give the folder that it makes"
    )
