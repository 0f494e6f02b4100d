"""Conversations to learn from: the usable rows of a file, a folder or the hub; each row left out is counted and named.

A row is one of

    {"messages": [...]}                 a list as qerl/data/messages.py reads it (OpenAI, ShareGPT as "conversations")
    {"prompt": ..., "completion": ...}  two texts, or two lists of messages, of which only the second is learned
    {"question": ..., "answer": ...}    two texts, by the columns of the task
    {"instruction", "input", "output"}  Alpaca's three columns, of which the second may be empty

and may bring `tools`, the schemas that its chat template is shown. A row is left out, with its reason, if it is not a
row, if its messages cannot be read or have none of the assistant that is learned, or if an earlier row is the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl.base.errors import DataError
from qerl.base.isolate import short
from qerl.data.examples import PEEK, Tally, check_rows, open_rows, present_rows
from qerl.data.messages import (
    INSTRUCTION,
    Spoken,
    UnusableError,
    as_messages,
    check_text,
    is_learned,
    read_message,
    tools_of,
    with_input,
    with_system,
)
from qerl.data.rows import Row, is_empty, names_of
from qerl.data.tasks import Task, build_messages, get_task, task_of

if TYPE_CHECKING:
    from qerl.config.data import DataConfig
    from qerl.config.validation import ValidationConfig

LISTS = ("messages", "conversations", "conversation")  # columns of whole conversations
ANSWERS = ("completion", "response", "output")  # of what follows a prompt, beside the task's own


@dataclass(frozen=True)
class Conversation:
    """One usable row: its messages, of which those from `learned_from` on are learned if they are the assistant's."""

    id: str
    messages: tuple[Spoken, ...]
    learned_from: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    passed: frozenset[int] = frozenset()  # messages of the assistant that say that they are not learned

    @property
    def answers(self) -> list[int]:
        """The numbers of the messages that are learned."""
        spoken = (i for i, each in enumerate(self.messages) if each["role"] == "assistant")
        return [i for i in spoken if i >= self.learned_from and i not in self.passed]


@dataclass(frozen=True)
class Source:
    """Where rows are read: data.source and what goes with it, or validation.source."""

    source: str | None
    split: str
    columns: Mapping[str, str] | None


def held_out_source(data: DataConfig, this: ValidationConfig) -> tuple[Task, Source] | None:
    """The task and the source of a recipe's validation rows; None if they are to be some of the rows of its own data.

    That is so for data of the user's own where the recipe names no other rows.
    """
    own = data.source is not None or data.held_out
    if this.source is None and this.task is None and own:
        return None
    task = task_of(data) if this.task is None else get_task(this.task)
    return task, Source(this.source, this.split, None if this.source is None else data.columns)


def load_conversations(data: DataConfig, task: Task, source: Source, limit: int | None) -> list[Conversation]:
    """The usable rows of `source`, at most `limit`; says in one line what became of all rows.

    Raises DataError if nothing can be read, if there is no column of conversations, or if no row is usable.
    """
    name, rows = open_rows(task, task.solved, source.source, source.split)
    first = list(itertools.islice(rows, PEEK))
    columns = _columns(task, name, source.columns or {}, first)
    found: dict[str, Conversation] = {}
    tally = Tally()
    for place, row in itertools.chain(first, rows):
        with tally.taking(place):
            read = _read(row, columns, data, task, str(tally.total))
            key = json.dumps([read.messages, read.tools, read.answers], sort_keys=True, default=str)
            if (earlier := found.get(key)) is not None:
                raise UnusableError("the same as an earlier row", f"the same as row {earlier.id}")
            found[key] = read
    tally.report(name, len(found), limit, "learned from")
    return list(found.values())[:limit]


def check_conversations(task: Task, source: Source) -> None:
    """Raise what `load_conversations` would raise for the first rows; of a hub id only the form is checked."""
    given = source.source
    check_rows(task, task.solved, given, source.split, lambda rows: _columns(task, given, source.columns or {}, rows))


def _columns(task: Task, name: str, asked: Mapping[str, str], rows: Sequence[Row]) -> tuple[str, str | None]:
    """The column of messages and None, or the columns of prompt and answer."""
    present = present_rows(name, rows)
    there = dict.fromkeys(str(column) for row in present for column in row)
    own = {key: [value] if isinstance(value, str) else list(value) for key, value in task.columns.items()}
    prompts = (
        [asked["question"]] if "question" in asked else [*LISTS, "prompt", *own["question"], "question", INSTRUCTION]
    )
    answers = [asked["answer"]] if "answer" in asked else [*ANSWERS, *own["answer"], "answer"]
    prompt = next((column for column in prompts if column in there), None)
    answer = next((column for column in answers if column in there), None)
    listed = prompt in LISTS or any(as_messages(row.get(prompt)) is not None for row in present)
    if prompt is None or (answer is None and not listed):
        raise DataError(
            f"{name} has no column of conversations (its columns: {names_of(there)}): give `messages`, or `prompt` "
            f"and `completion`, or map yours with --columns question={prompt or 'THEIR_PROMPT'},"
            "answer=THEIR_COMPLETION (a recipe: data.columns)"
        )
    return prompt, None if prompt in LISTS and "answer" not in asked else answer


def _read(
    row: Mapping[str, Any] | None, columns: tuple[str, str | None], data: DataConfig, task: Task, number: str
) -> Conversation:
    """A row's conversation, or UnusableError."""
    if row is None:
        raise UnusableError("no readable row")
    prompt, answer = columns
    system = task.system_prompt if data.system_prompt == "default" else data.system_prompt
    asked, given = row.get(prompt), row.get(answer) if answer is not None else None
    of_text = answer is not None and isinstance(asked, str) and as_messages(asked) is None
    if of_text:
        if is_empty(asked):
            raise UnusableError("an empty prompt")
        check_text(asked, prompt)
        own = with_system(row, ())
        question = with_input(row, prompt, asked, answer).strip()
        before = [*own, *build_messages(task, question, None if own else data.system_prompt, data.prompt_template)]
        learned = [True] * len(before)
    else:
        read, learned = _messages(asked)
        before = with_system(row, read)
        learned = [*([True] * (len(before) - len(read))), *learned]
        if system and all(message["role"] != "system" for message in before):
            before, learned = [{"role": "system", "content": system}, *before], [True, *learned]
    after: list[Spoken] = []
    if (listed := as_messages(given)) is not None:
        after, of_answer = _messages(listed)
        learned = [*learned, *of_answer]
    elif isinstance(given, str) and not is_empty(given):
        check_text(given, answer)
        after, learned = [{"role": "assistant", "content": given.strip()}], [*learned, True]
    elif of_text:
        raise UnusableError("no text to learn", f"its column {answer!r} is {short(given)}")
    learned_from = len(before) if after else 0
    return _conversation(row, number, [*before, *after], learned_from, learned)


def _conversation(
    row: Mapping[str, Any], number: str, messages: Sequence[Spoken], learned_from: int, learned: Sequence[bool]
) -> Conversation:
    answers = [i for i, each in enumerate(messages) if i >= learned_from and each["role"] == "assistant"]
    if not answers:
        raise UnusableError("no message of the assistant")
    passed = frozenset(i for i in answers if not learned[i])
    empty = [i for i in answers if i not in passed and not (messages[i]["content"].strip() or len(messages[i]) > 2)]
    if empty:
        raise UnusableError(
            "an empty message of the assistant", f"its message {empty[0] + 1} would be learned, and is empty"
        )
    if len(passed) == len(answers):
        raise UnusableError("no message that is learned", "each message of the assistant says that it is not learned")
    name = number if is_empty(row.get("id")) else str(row["id"])
    return Conversation(name, tuple(messages), learned_from, tools_of(row), passed)


def _messages(cell: Any) -> tuple[list[Spoken], list[bool]]:
    """The messages of a cell, and which of them may be learned."""
    listed = as_messages(cell)
    if not listed:
        raise UnusableError("no list of messages", f"its messages are {short(cell)}")
    read = [read_message(each, number) for number, each in enumerate(listed, start=1)]
    return read, [is_learned(each, number) for number, each in enumerate(listed, start=1)]
