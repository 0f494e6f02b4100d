"""The word game: the model guesses a word of the row's list, and hears whether the answer comes before or after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WordGame:
    """The reward is 1 for the word and 0 at the end of the turns; a guess that is no word of the list earns nothing."""

    def reset(self, example: Mapping[str, Any]) -> None:
        """The row's question lists the words, and its answer is the one to find."""
        self._secret = example["answer"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take a guess; returns (hint, reward, done)."""
        guess = action.strip().rstrip(".").lower()
        if guess == self._secret:
            return "", 1.0, True
        return ("before" if self._secret < guess else "after"), 0.0, False
