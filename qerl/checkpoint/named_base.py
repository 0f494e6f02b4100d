"""The base that a run or an adapter names, and where that base is."""

from __future__ import annotations

import os
from pathlib import Path

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.base.nearby import expanded
from qerl.checkpoint.shards import read_json

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
