"""Chat templates, and the text of completions.

Whether a model folder has a chat template, and which variables a recipe sets in it. Loads no transformers.

Completions as text, for graders, rewards, completions/ and people.

Only tokens that end or pad a completion are left out. What a tokenizer marks as special besides them is a part of the
answer: some mark `<think>` or `<tool_call>` so, and a grader has to see these.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
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


class CompletionText:
    """Token ids -> text, with the tokenizer of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]) -> None:
        """`end_ids` end a completion; so do the tokenizer's end of a sequence and what it pads with."""
        self._tokenizer = tokenizer
        self._left_out = frozenset([*end_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) - {None}

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The text of one completion."""
        kept = [token for token in map(int, token_ids) if token not in self._left_out]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def batch(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several."""
        return [self(token_ids) for token_ids in completions]


def text_of_engine(tokenizer: PreTrainedTokenizerBase, engine: Any) -> CompletionText:
    """The text of what an open engine samples."""
    return CompletionText(tokenizer, getattr(engine, "end_token_ids", ()))
