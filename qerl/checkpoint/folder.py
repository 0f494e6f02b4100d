"""What a single folder contains: its kind, its number format, and the model that it names as its base or was made from.

`qerl.checkpoint.resolve` follows the names from folder to folder. Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.base.files import expanded
from qerl.checkpoint.hub import check_links
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


TINY = "tiny"
TINY_FOLDER = Path(__file__).parents[1] / "tiny"
TINY_TURNS = "tiny_turns"  # the same model, taught to use a tool and to play a game (scripts/models/tiny_turns.py)
TINY_TURNS_FOLDER = Path(__file__).parents[1] / "tiny_turns"
TINY_EXPERTS = "tiny_experts"  # a mixture of experts that knows what tiny knows (scripts/models/tiny_experts.py)
TINY_EXPERTS_FOLDER = Path(__file__).parents[1] / "tiny_experts"
EMBEDDED = {TINY: TINY_FOLDER, TINY_TURNS: TINY_TURNS_FOLDER, TINY_EXPERTS: TINY_EXPERTS_FOLDER}
WORDS = {folder: word for word, folder in EMBEDDED.items()}
TRAINED_ON = "trained_on.json"  # of an adapter's folder that names another model to PEFT (peft_folder.py)


def model_of_adapter(folder: Path) -> tuple[str, str | None]:
    """The base that an adapter was trained on, and its number format if that is known.

    If that base is a folder that is not here, the model that it was quantized from stands for it, in its format: on
    another machine it may have been quantized as well.
    """
    named = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    base, own = named, None
    if (folder / TRAINED_ON).is_file():
        origin = read_json(folder / TRAINED_ON)
        trained, own = origin.get("base"), origin.get("format")
        if not isinstance(trained, str) or own not in formats.names():
            raise CheckpointError(
                f"{folder / TRAINED_ON} names no base and format: write `--model BASE --adapter {folder}`"
            )
        is_here = trained in EMBEDDED or os.path.isdir(expanded(beside(folder, trained)))
        base = trained if is_here or not named or trained == named else named
    if not base or not isinstance(base, str):
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} names no base: write `--model BASE --adapter {folder}`"
        )
    return base, own


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model by its word, and of any other model its own path."""
    return EMBEDDED.get(name) or Path(name)


def beside(owner: Path, base: str) -> str:
    """Find a relative folder `base` that a run or an adapter (`owner`) names.

    The folders above the owner are searched from the nearest up, since the current folder may hold another model of
    that name. If it is the current folder that has the base, or none has, the name stays relative.
    """
    if not Path(base).is_absolute() and base not in EMBEDDED:
        for parent in owner.resolve().parents:
            if any((parent / base / name).is_file() for name in ("config.json", "config.yaml", "adapter_config.json")):
                return base if parent == Path.cwd() else str(parent / base)
    return base


CHECKPOINTS = Path("checkpoints")
REPORT = "quantize_report.json"


def quantized_from(folder: Path) -> str | None:
    """The model from which a quantized folder was made, according to its report; None if it has no report."""
    return read_json(folder / REPORT).get("source") if (folder / REPORT).is_file() else None


def default_quantized_dir(model: str, format: Format = formats.DEFAULT) -> Path:
    """Where `qerl quantize --model M` writes without --out: `checkpoints/<name>-<SCHEME>` under the current folder."""
    name = model if model in EMBEDDED else Path(model).expanduser().resolve().name if Path(model).exists() else model
    return CHECKPOINTS / f"{name.rstrip('/').rsplit('/', 1)[-1]}{format.folder_suffix}"


def quantize_line(model: str, format: Format) -> str:
    """The command that makes the folder of a model in a quantized format."""
    return f"qerl quantize --model {model}{'' if format is formats.DEFAULT else f' --scheme {format.name}'}"
