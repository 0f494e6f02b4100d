"""Merge an adapter that was trained through the quantizer: its run's model is exported, with the engine's bytes."""

from __future__ import annotations

import re
from pathlib import Path

from qerl.base.errors import ConfigError
from qerl.checkpoint.shards import read_json
from quantize.export.options import ExportOptions
from quantize.export.run import ExportReport, export
from quantize.merge.options import MergeOptions


def export_of_adapter(options: MergeOptions, run: Path, adapter: Path, out: Path) -> ExportReport:
    """Write the model with an `adapter` of `run` as `qerl export` does, whichever of the run's folders it is in.

    Raises ConfigError for options that would give another model than the one that was trained.
    """
    asked = {"--model": options.model, "--onto": None if options.onto == "auto" else options.onto}
    for option, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value}: the adapter of {run} was trained within the packed weights of its own 16-bit "
                f"model: leave {option} out"
            )
    if options.prompts is not None:
        raise ConfigError(
            f"--prompts {options.prompts}: nothing is lost in packing the adapter of {run}, so that there is no effect "
            "to measure: leave --prompts out"
        )
    shared = {name: getattr(options, name) for name in ("push_to_hub", "public", "overwrite", "force", "device")}
    return export(ExportOptions(run, options.to, out, _step(adapter), **shared))


def _step(adapter: Path) -> int | None:
    """The step of a checkpoint, or of the run's best; None for its last."""
    if (best := adapter / "validation.json").is_file():
        return read_json(best)["step"]
    named = re.fullmatch(r"step-(\d+)", adapter.resolve().name)
    return int(named[1]) if named else None
