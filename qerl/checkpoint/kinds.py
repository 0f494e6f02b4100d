"""What a folder holds, decided from its files alone: base, NVFP4 checkpoint, adapter or run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qerl.checkpoint.shards import read_json
from qerl.errors import CheckpointError

ModelKind = Literal["base16", "nvfp4", "adapter", "run"]
NVFP4_FORMAT = "nvfp4-pack-quantized"
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}


def kind_of(folder: Path) -> ModelKind:
    """What a folder holds, decided from its files. Raises CheckpointError for anything qerl cannot use."""
    if (kind := resting_kind(folder)) is not None:
        return kind
    if (folder / "config.json").is_file():
        return _base_kind(folder, read_json(folder / "config.json"))
    raise CheckpointError(
        f"{folder} has no config.json, adapter_config.json, or config.yaml with metrics.jsonl: give a model, "
        "an NVFP4 checkpoint, an adapter or a run directory"
    )


def resting_kind(folder: Path) -> Literal["adapter", "run"] | None:
    """Of what names a model elsewhere as its base; None for anything else."""
    if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
        return "run"
    return "adapter" if (folder / "adapter_config.json").is_file() else None


def _base_kind(folder: Path, config: dict) -> ModelKind:
    quantization = config.get("quantization_config")
    if quantization is None:
        return "base16"
    groups = quantization.get("config_groups", {}) if isinstance(quantization, dict) else None
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(
            f"{folder / 'config.json'} has a quantization_config that cannot be read: copy or download the file again"
        )
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if method != "compressed-tensors" or layout != NVFP4_FORMAT:
        raise CheckpointError(
            f"{folder} is already quantized as {method}{f' ({layout})' if layout else ''}, and qerl reads 16-bit "
            f"models and {NVFP4_FORMAT}: give the model that it was made from"
        )
    if any(group.get("input_activations") for group in groups.values()):
        raise CheckpointError(
            f"{folder} quantizes activations too (NVFP4 W4A4), and qerl trains on 16-bit activations: run "
            "`qerl quantize` on the model that it was made from"
        )
    for group in groups.values():
        weights = group.get("weights") or {}
        other = {key: weights[key] for key, own in NVFP4_WEIGHTS.items() if weights.get(key, own) != own}
        if other:
            raise CheckpointError(
                f"{folder / 'config.json'} calls its weights {NVFP4_FORMAT} with {other}, and NVFP4 is "
                f"{NVFP4_WEIGHTS}: copy or download it again, or run `qerl quantize` on the model that it was made from"
            )
    return "nvfp4"
