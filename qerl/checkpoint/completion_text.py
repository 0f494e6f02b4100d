"""Completions as text, for graders, rewards, completions/ and people.

Only tokens that end or pad a completion are left out. What a tokenizer marks as special besides them is a part of the
answer: some mark `<think>` or `<tool_call>` so, and a grader has to see these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
