"""Conversations to learn from: the usable rows of a file, a folder or the hub; each row left out is counted and named.

A row is one of

    {"messages": [...]}                 a list as qerl/data/messages.py reads it (OpenAI, ShareGPT as "conversations")
    {"prompt": ..., "completion": ...}  two texts, or two lists of messages, of which only the second is learned
    {"question": ..., "answer": ...}    two texts, by the columns of the task

and may bring `tools`, the schemas that its chat template is shown. A row is left out, with its reason, if it is no row,
if its messages cannot be read or have none of the assistant, or if an earlier row is the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl.data.cells import is_empty
from qerl.data.messages import ROLES, SHAREGPT, text_of
from qerl.data.rows import Row, check_hub_id, generated_rows, hub_rows, is_local, local_rows
from qerl.data.usable_rows import DropReport
from qerl.errors import DataError
from qerl.tasks import Task, build_messages, get_task, task_of

if TYPE_CHECKING:
    from qerl.config.schema import DataConfig, RunConfig

log = logging.getLogger(__name__)

LISTS = ("messages", "conversations", "conversation")  # columns of whole conversations
ANSWERS = ("completion", "response", "output")  # of what follows a prompt, beside the task's own
PEEK, NAMED = 100, 2  # rows whose columns are looked at; rows named for each reason

Spoken = dict[str, Any]  # a message: role, content, and what a template reads of it besides


@dataclass(frozen=True)
class Conversation:
    """One usable row: its messages, of which those from `learned_from` on are learned if they are the assistant's."""

    id: str
    messages: tuple[Spoken, ...]
    learned_from: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Source:
    """Where rows are read: data.source and what goes with it, or validation.source."""

    source: str | None
    split: str
    columns: Mapping[str, str] | None


def held_out_source(config: RunConfig) -> tuple[Task, Source] | None:
    """The task and the source of a recipe's validation rows; None if they are to be some of the rows of its own data.

    That is so for data of the user's own where the recipe names no other rows.
    """
    this = config.validation
    if this.source is None and this.task is None and config.data.source is not None:
        return None
    columns = config.data.columns if this.source is not None and this.columns is None else this.columns
    task = task_of(config.data) if this.task is None else get_task(this.task)
    return task, Source(this.source, this.split, columns)


class _UnusableError(Exception):
    """Why a row is left out: the reason it is counted under, and what is said of this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail or reason


def load_conversations(data: DataConfig, task: Task, source: Source, limit: int | None) -> list[Conversation]:
    """The usable rows of `source`, at most `limit`; says in one line what became of all rows.

    Raises DataError if nothing can be read, if there is no column of conversations, or if no row is usable.
    """
    name, rows = _open(task, source)
    first = list(itertools.islice(rows, PEEK))
    columns = _columns(task, name, source.columns or {}, first)
    found: dict[str, Conversation] = {}
    counts: Counter[str] = Counter()
    named: list[str] = []
    total = 0
    for place, row in itertools.chain(first, rows):
        total += 1
        try:
            read = _read(row, columns, data, task, str(total))
            key = json.dumps([read.messages, read.tools], sort_keys=True, default=str)
            if (earlier := found.get(key)) is not None:
                raise _UnusableError("the same as an earlier row", f"the same as row {earlier.id}")
            found[key] = read
        except _UnusableError as error:
            counts[error.reason] += 1
            if counts[error.reason] <= NAMED:
                named.append(f"{place}: {error.detail}")
    kept = list(found.values())[:limit]
    report = DropReport(name, total, len(found), len(found) - len(kept), dict(counts), tuple(named))
    if not kept:
        raise DataError(f"no row can be learned from: {report}")
    log.log(logging.WARNING if counts else logging.INFO, "%s", report)
    return kept


def check_conversations(task: Task, source: Source) -> None:
    """Raise what `load_conversations` would raise for the first rows; of a hub id only the form is checked."""
    if source.source is None:
        _open(task, source)
    elif is_local(source.source):
        rows = list(itertools.islice(local_rows(source.source, source.split), PEEK))
        _columns(task, source.source, source.columns or {}, rows)
    else:
        check_hub_id(source.source.partition(":")[0])


def _open(task: Task, source: Source) -> tuple[str, Iterator[Row]]:
    """The name of the source for messages, and its rows."""
    given = source.source
    if given is not None and is_local(given):
        return given, local_rows(given, source.split)
    if given is not None:
        name, _, subset = given.partition(":")
        return given, hub_rows(name, subset or None, source.split)
    if source.split not in task.splits:
        known = " and ".join(task.splits)
        raise DataError(f"task {task.name} has no split {source.split!r}, only {known}: pass rows with --data FILE")
    if task.solved is not None:
        return f"task {task.name} ({source.split})", generated_rows(task.solved(source.split))
    if task.hub is not None:
        return task.hub, hub_rows(task.hub, task.hub_config, task.splits[source.split])
    raise DataError(
        f"task {task.name} has no conversations of its own to learn from: pass your rows with --data FILE (a recipe: "
        "data.source)"
    )


def _columns(task: Task, name: str, asked: Mapping[str, str], rows: Sequence[Row]) -> tuple[str, str | None]:
    """The column of messages and None, or those of prompt and answer."""
    present = [row for _, row in rows if row is not None]
    if not present:
        raise DataError(f"{name} holds no rows: is it the right file, and in the format that its name says?")
    there = dict.fromkeys(str(column) for row in present for column in row)
    own = {key: [value] if isinstance(value, str) else list(value) for key, value in task.columns.items()}
    prompts = [asked["question"]] if "question" in asked else [*LISTS, "prompt", *own["question"], "question"]
    answers = [asked["answer"]] if "answer" in asked else [*ANSWERS, *own["answer"], "answer"]
    prompt = next((column for column in prompts if column in there), None)
    answer = next((column for column in answers if column in there), None)
    listed = prompt in LISTS or any(isinstance(row.get(prompt), list) for row in present)
    if prompt is None or (answer is None and not listed):
        raise DataError(
            f"{name} has no column of conversations (its columns: {', '.join(there)}): give `messages`, or `prompt` "
            "and `completion`, or map yours with --columns question=THEIR_PROMPT,answer=THEIR_COMPLETION (a recipe: "
            "data.columns)"
        )
    return prompt, None if prompt in LISTS and "answer" not in asked else answer


def _read(
    row: Mapping[str, Any] | None, columns: tuple[str, str | None], data: DataConfig, task: Task, number: str
) -> Conversation:
    """A row's conversation, or _UnusableError."""
    if row is None:
        raise _UnusableError("no readable row")
    prompt, answer = columns
    system = task.system_prompt if data.system_prompt == "default" else data.system_prompt
    if isinstance(row.get(prompt), str) and answer is not None:
        before = build_messages(task, row[prompt].strip(), data.system_prompt, data.prompt_template)
        if is_empty(row[prompt]):
            raise _UnusableError("an empty prompt")
    else:
        before = _messages(row.get(prompt))
        if system and all(message["role"] != "system" for message in before):
            before = [{"role": "system", "content": system}, *before]
    after, given = [], row.get(answer) if answer is not None else None
    if isinstance(given, str) and not is_empty(given):
        after = [{"role": "assistant", "content": given.strip()}]
    elif isinstance(given, list):
        after = _messages(given)
    elif answer is not None and isinstance(row.get(prompt), str):
        raise _UnusableError("no text to learn", f"its column {answer!r} is {_short(given)}")
    learned_from = len(before) if after else 0
    messages = [*before, *after]
    if not any(message["role"] == "assistant" for message in messages[learned_from:]):
        raise _UnusableError("no message of the assistant")
    name = number if is_empty(row.get("id")) else str(row["id"])
    return Conversation(name, tuple(messages), learned_from, _tools(row.get("tools")))


def _messages(cell: Any) -> list[Spoken]:
    if isinstance(cell, str):  # a column of JSON text, as some files have it
        with contextlib.suppress(ValueError):
            cell = json.loads(cell)
    if not isinstance(cell, list) or not cell:
        raise _UnusableError("no list of messages", f"its messages are {_short(cell)}")
    return [_message(each, number) for number, each in enumerate(cell, start=1)]


def _message(value: Any, number: int) -> Spoken:
    given = value if isinstance(value, Mapping) else {}
    role, content = given.get("role"), given.get("content")
    if "role" not in given and "from" in given:
        role, content = SHAREGPT.get(str(given["from"])), given.get("value")
    calls = None if is_empty(given.get("tool_calls")) else given["tool_calls"]
    text = "" if content is None and calls else text_of(content)
    if role not in ROLES:
        raise _UnusableError("a message without a role", f"its message {number} has no role ({', '.join(ROLES)})")
    if text is None:
        raise _UnusableError("a message without a text", f"its message {number} has no text as content")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _UnusableError("half a character", f"its message {number} holds half a character") from None
    spoken: Spoken = {"role": role, "content": text}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(given.get(key), str):
            spoken[key] = given[key]
    return {**spoken, "tool_calls": [_call(each, number) for each in calls]} if calls else spoken


def _call(value: Any, number: int) -> dict[str, Any]:
    """A tool call whose arguments are an object, which templates write; OpenAI keeps them as a text."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _UnusableError("a tool call without a name", f"message {number} has a tool call without a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise _UnusableError(
                "a tool call that is no JSON", f"message {number} has a tool call whose arguments are no JSON"
            ) from None
    return {**value, "type": "function", "function": {**function, "arguments": arguments}}


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and not is_empty(value):
        try:
            value = json.loads(value)
        except ValueError:
            raise _UnusableError("tools that are no JSON") from None
    if is_empty(value):
        return ()
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise _UnusableError("tools that are no list of schemas", f"its tools are {_short(value)}")
    return tuple(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
