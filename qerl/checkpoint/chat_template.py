"""Whether a model folder has a chat template, and which variables a recipe sets in it. Loads no transformers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.resolve import ModelRef
from qerl.checkpoint.shards import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a chat template is given already.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


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


def check_switches(tokenizer: PreTrainedTokenizerBase, switches: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError for a variable that the chat template does not read, under the `key` that set it."""
    template = tokenizer.get_chat_template() if switches else ""
    for name in switches:
        if name in GIVEN:
            raise ConfigError(f"{key} sets {name}, which qerl gives the chat template itself: leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            near = difflib.get_close_matches(name, set(re.findall(r"\b[a-z]\w*_\w+\b", template)), n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out, or use a model whose template has it"
            raise ConfigError(
                f"{key} sets {name}, which the chat template of {tokenizer.name_or_path!r} does not read: {hint}"
            )
