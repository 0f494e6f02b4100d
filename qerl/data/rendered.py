"""Rows -> prompts as token ids, in training, validation and evaluation; what a template does not write is left out.

A row of which the chat template writes only a part (qerl/data/written.py) would ask something else than it says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qerl.base.errors import DataError
from qerl.data.tasks import Example, Message, render_prompt
from qerl.data.written import Written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.episodes.chat import Chat

logger = logging.getLogger(__name__)

PLAIN = {"role", "content"}
ENOUGH = 32  # rows of questions of one form that were written; further ones are not looked through


@dataclass(frozen=True)
class RenderedRow:
    """A row, the messages that ask it, and their token ids."""

    example: Example
    messages: tuple[Message, ...]
    ids: list[int]


@dataclass
class Renderer:
    """The chat template of one model with its `switches`; a `chat` adds the tools of an environment."""

    tokenizer: PreTrainedTokenizerBase
    switches: Mapping[str, Any] | None = None
    chat: Chat | None = None
    left_out: dict[str, list[str]] = field(default_factory=dict)  # reason -> ids of rows

    def __post_init__(self) -> None:
        self._written = Written(self.tokenizer, self.switches)
        self._found: dict[tuple[str, ...], int] = {}  # roles of plain messages -> rows that were written

    def rows(self, asked: Sequence[tuple[Example, Sequence[Message]]]) -> list[RenderedRow]:
        """The prompts of rows. Those that the template writes in part are left out, counted and named in one line.

        Raises DataError if none is left, CheckpointError for a template that refuses one.
        """
        rows = []
        for example, messages in asked:
            if (reason := self._missing(example, messages)) is not None:
                self.left_out.setdefault(reason, []).append(example.id)
                continue
            if self.chat is not None:
                ids = self.chat.prompt(messages)
            else:
                ids = render_prompt(self.tokenizer, messages, self.switches, example.tools)
            rows.append(RenderedRow(example, tuple(messages), ids))
        said = [
            f"{len(ids)} rows are left out (e.g. {', '.join(ids[:3])}): {why}" for why, ids in self.left_out.items()
        ]
        if asked and not rows:
            raise DataError(f"no row can be asked: {'; '.join(said)}")
        for line in said:
            logger.warning("%s", line)
        return rows

    def _missing(self, example: Example, messages: Sequence[Message]) -> str | None:
        """What of the row the template does not write; None if it writes all."""
        form = tuple(message["role"] for message in messages)
        plain = not example.tools and "assistant" not in form and all(PLAIN.issuperset(each) for each in messages)
        if plain and self._found.get(form, 0) >= ENOUGH:
            return None
        if example.tools and self.chat is not None:
            return "the row brings tools of its own, and the environment has others: remove the column `tools`"
        from qerl.checkpoint.sandbox import SandboxError, render_text

        try:
            text = render_text(self.tokenizer, messages, True, example.tools, self.switches)
        except SandboxError:  # said by what renders it next
            return None
        missing = self._written.missing(text, messages, example.tools)
        if plain and missing is None:
            self._found[form] = self._found.get(form, 0) + 1
        return missing
