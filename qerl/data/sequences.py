"""Rows as token ids: prompts for training, validation and evaluation, and shuffled sequences to calibrate on.

A row of which the chat template writes only a part (qerl/data/messages.py) would ask something else than it says, and
is left out.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError, DataError, counted
from qerl.base.sandbox import SandboxError, named, render_chat, render_text, said_of
from qerl.data.examples import open_rows
from qerl.data.messages import INPUT, INSTRUCTION, Written, as_messages
from qerl.data.rows import Row, hub_rows, is_local, local_rows, names_of
from qerl.data.tasks import TASKS, Example, Message, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """The chat template of one model with its `switches`.

    `prompt` renders messages with the tools of an environment, in place of the template alone.
    """

    tokenizer: PreTrainedTokenizerBase
    switches: Mapping[str, Any] | None = None
    prompt: Callable[[Sequence[Message]], list[int]] | None = None
    left_out: dict[str, list[str]] = field(default_factory=dict)  # reason -> ids of rows

    def __post_init__(self) -> None:
        self._written = Written(self.tokenizer, self.switches)
        self._found: dict[tuple[str, ...], int] = {}  # roles of plain messages -> rows that were written

    def rows(self, asked: Sequence[tuple[Example, Sequence[Message]]]) -> list[RenderedRow]:
        """The prompts of rows. Those that the template writes in part are left out, counted and named in one line.

        Raises DataError if none is left, CheckpointError for a template that refuses one.
        """
        rows, quoting, quoted = [], [], set()
        for example, messages in asked:
            if (reason := self._missing(example, messages)) is not None:
                self.left_out.setdefault(reason, []).append(example.id)
                continue
            if self.prompt is not None:
                ids = self.prompt(messages)
            else:
                ids = render_prompt(self.tokenizer, messages, self.switches, example.tools)
            rows.append(RenderedRow(example, tuple(messages), ids))
            if names := named(self.tokenizer, [list(messages), list(example.tools)], self.switches):
                quoting.append(example.id)
                quoted |= names
        said = [
            f"{counted(len(ids), 'row')} left out (e.g. {', '.join(ids[:3])}): {why}"
            for why, ids in self.left_out.items()
        ]
        if asked and not rows:
            raise DataError(f"no row can be asked: {'; '.join(said)}")
        for line in [*said, *([said_of(quoting, quoted)] if quoting else [])]:
            logger.warning("%s", line)
        return rows

    def _missing(self, example: Example, messages: Sequence[Message]) -> str | None:
        """What of the row the template does not write; None if it writes all."""
        form = tuple(message["role"] for message in messages)
        plain = not example.tools and "assistant" not in form and all(PLAIN.issuperset(each) for each in messages)
        if plain and self._found.get(form, 0) >= ENOUGH:
            return None
        if example.tools and self.prompt is not None:
            return "the row brings tools of its own, and the environment has others: remove the column `tools`"
        try:
            text = render_text(self.tokenizer, messages, True, example.tools, self.switches)
        except SandboxError:  # said by what renders it next
            return None
        missing = self._written.missing(text, messages, example.tools)
        if plain and missing is None:
            self._found[form] = self._found.get(form, 0) + 1
        return missing


SEED = 0
MAX_ROWS = 100_000  # more than any recipe needs; the rest of a larger data set is not read
TEXT = ("text", "content")
CHAT = ("messages", "conversation", "conversations", "prompt")
ASK = ("prompt", "question", "problem", "instruction", "input")
REPLY = ("completion", "response", "answer", "solution", "output")


def shuffled_rows(data: str, option: str) -> list[Any]:
    """At most MAX_ROWS of its rows. `option` is what names the data. Raises DataError."""
    rows = _first_rows(data, option, MAX_ROWS)
    random.Random(SEED).shuffle(rows)
    return rows


def check_readable(data: str, option: str) -> None:
    """Raise DataError, which names the `option`, if there is not even a first row."""
    _first_rows(data, option, 1)


def _first_rows(data: str, option: str, most: int) -> list[Any]:
    try:
        rows = [row for _, row in islice(_rows(data, option), most)]
    except DataError as error:
        raise error if option in str(error) else DataError(f"{option}: {error}") from error
    if not rows:
        raise DataError(f"{option} {data} is empty: give a file with one JSON object per line")
    return rows


def _rows(data: str, option: str) -> Iterator[Row]:
    """Rows of a file, of one of our tasks' training split, or of a hub data set's."""
    if is_local(data):
        return local_rows(data, "train")
    task = next((task for name, task in TASKS.items() if data in (name, task.hub)), None)
    if task is None:
        return hub_rows(data, None, "train")
    if "train" not in task.splits:
        raise DataError(f"{option} {data} is for evaluation and has no training rows: give another data set")
    return open_rows(task, task.generate, None, "train")[1]


def tokens_of(row: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a row, with special tokens; empty if the row has no usable text."""
    if not isinstance(row, dict):
        return []
    messages = _messages(row)
    if messages and tokenizer.chat_template:
        try:
            return render_chat(tokenizer, messages, add_generation_prompt=False)
        except SandboxError as error:
            raise CheckpointError(
                f"the chat template of {tokenizer.name_or_path!r} refuses a row with the roles "
                f"{[message['role'] for message in messages]}: {error}; leave such rows out"
            ) from error
    text = "\n\n".join(message["content"] for message in messages) or _first_text(row, TEXT)
    ids = tokenizer(text)["input_ids"] if text else []
    end = tokenizer.eos_token_id
    return [*ids, end] if ids and end is not None and ids[-1] != end else ids


def _messages(row: dict) -> list[dict[str, str]]:
    for key in CHAT:
        turns = as_messages(row.get(key))
        if turns and all(_is_turn(turn) for turn in turns):
            reply = _first_text(row, REPLY) if key == "prompt" else ""
            return [*turns, *([{"role": "assistant", "content": reply}] if reply else [])]
    question, reply = _first_text(row, ASK), _first_text(row, REPLY)
    if question and question == row.get(INSTRUCTION) and _first_text(row, (INPUT,)):
        question = f"{question.strip()}\n\n{row[INPUT].strip()}"
    if not question:
        return []
    return [{"role": "user", "content": question}, *([{"role": "assistant", "content": reply}] if reply else [])]


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _first_text(row: dict, keys: Iterable[str]) -> str:
    return next((row[key] for key in keys if isinstance(row.get(key), str) and row[key].strip()), "")


def fields_of(row: Any) -> str:
    """The names of a row's fields, for messages."""
    return names_of(row) if isinstance(row, dict) else type(row).__name__
