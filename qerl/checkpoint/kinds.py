"""What a folder holds, decided from its files alone: 16-bit base, quantized checkpoint, adapter or run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.checkpoint.links import check_links
from qerl.checkpoint.shards import read_json
from qerl.formats.base import Format

ModelKind = Literal["base16", "quantized", "adapter", "run"]


def kind_of(folder: Path) -> ModelKind:
    """What a folder holds, decided from its files. Raises CheckpointError for anything qerl cannot use."""
    if (kind := resting_kind(folder)) == "run":
        return kind
    check_links(folder)
    if kind is not None:
        return kind
    if (folder / "config.json").is_file():
        return "quantized" if format_of(folder).quantized else "base16"
    raise CheckpointError(
        f"{folder} has no config.json, adapter_config.json, or config.yaml with metrics.jsonl: give a model "
        "(16-bit or quantized), an adapter or a run directory"
    )


def resting_kind(folder: Path) -> Literal["adapter", "run"] | None:
    """The kind of a folder that names a model elsewhere as its base; None for any other folder."""
    if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
        return "run"
    return "adapter" if (folder / "adapter_config.json").is_file() else None


def format_of(folder: Path) -> Format:
    """The number format of a model's weights, from its config.json. Raises CheckpointError for an unknown one."""
    quantization = read_json(folder / "config.json").get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(
            f"{folder / 'config.json'} has a quantization_config that cannot be read: copy or download the file again"
        )
    found = next((each for each in formats.all_formats() if each.recognises(quantization)), None)
    if found is None:
        method, layout = quantization.get("quant_method"), quantization.get("format")
        raise CheckpointError(
            f"{folder} is already quantized as {method}{f' ({layout})' if layout else ''}, and qerl reads 16-bit "
            f"models and {' and '.join(each.layout for each in formats.all_formats() if each.layout)}: give the model "
            "that it was made from"
        )
    found.check_config(folder, quantization)
    return found
