"""Whether a model folder has a chat template, read from its files before transformers is loaded."""

from __future__ import annotations

from pathlib import Path

from qerl.checkpoint.resolve import ModelRef, read_json
from qerl.errors import CheckpointError


def check_chat_template(ref: ModelRef) -> None:
    """Raise CheckpointError for a base whose tokenizer has no chat template.

    Files that are not on this machine yet are left to whoever loads the tokenizer.
    """
    folder = Path(ref.base) if Path(ref.base).is_dir() else ref.path
    config = folder / "tokenizer_config.json"
    if not config.is_file() or any(folder.glob("*chat_template*")) or read_json(config).get("chat_template"):
        return
    raise CheckpointError(
        f"the tokenizer in {folder} has no chat template, so prompts cannot be written as the model expects them: use "
        "the instruct version of the checkpoint, or put a chat_template.jinja into that folder"
    )
