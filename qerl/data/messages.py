"""A row's messages, as chats are stored: a list of {"role": "user", "content": text}.

The content may also be OpenAI's list of parts, {"type": "text", "text": text}, and a message may have ShareGPT's form,
{"from": "human", "value": text}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.tasks import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Asked:
    """The last message of the user, those `earlier`, and the assistant's `reply` to it, if it is there."""

    question: str
    earlier: tuple[Message, ...] = ()
    reply: str = ""


def read_messages(cell: Sequence[Any]) -> Asked:
    """The messages of a row. Raises ValueError, in words, for what is no chat that a model can continue."""
    messages = [_message(each, number) for number, each in enumerate(cell, start=1)]
    reply = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else ""
    if not messages or messages[-1]["role"] != "user":
        last = f"the last one is of the role {messages[-1]['role']!r}" if messages else "there is none of the user"
        raise ValueError(f"its messages ask nothing: {last}")
    *earlier, question = messages
    return Asked(question["content"].strip(), tuple(earlier), reply.strip())


def _message(value: Any, number: int) -> Message:
    given = value if isinstance(value, Mapping) else {}
    role, text = given.get("role"), text_of(given.get("content"))
    if "role" not in given and "from" in given:
        role, text = SHAREGPT.get(str(given["from"])), text_of(given.get("value"))
    if text is None or role not in ROLES:
        raise ValueError(f"its message {number} is no object with a role ({', '.join(ROLES)}) and a text as content")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"its message {number} holds half a character") from None
    return {"role": role, "content": text}


def text_of(content: Any) -> str | None:
    """The text of a content, whose parts follow one another; None for what is no text, such as a picture."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return "".join(parts) if parts and all(isinstance(part, str) for part in parts) else None
