"""Whether all that a row holds is in the text that the chat template makes of it.

A template writes what it knows: some pass over messages of a role, tool calls, tools, or thoughts beside the content,
without a word. The model would then be asked, or learn, something else than the row says. So each text of the row is
looked for in the rendered text, white space aside, and what was found is not found a second time.

Thoughts of earlier answers may be missing where the template writes those of a last one: Qwen3's drops them so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.data.messages import THOUGHTS, Spoken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK = re.compile(r"</?think(?:ing)?>")
PROBE = "QERL7PROBE3"
REMEDIES = {
    "role": "give such messages a role that the template writes, such as system",
    "calls": "use a model whose template writes tools, or write the calls into the content",
    "dropped": "leave the thoughts out of the rows, or use a model whose template writes them",
    "thought": "write thoughts into the content, as <think>...</think>, or leave their column out",
}
Text = tuple[str, str, tuple[str, ...]]  # what it is, the key of its remedy, and how it may be written


class Written:
    """The chat template of one model, asked whether it wrote a row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, switches: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._switches = tokenizer, switches
        self._writes: dict[str, bool] = {}  # whether it writes the thoughts of a last answer, by their key

    def missing(
        self,
        text: str,
        messages: Sequence[Spoken],
        tools: Sequence[Mapping[str, Any]] = (),
        learned: Collection[int] = (),
    ) -> str | None:
        """What of the messages and tools is not in the rendered `text`, and what to do; None if all is there.

        Of the messages with the numbers `learned` thoughts have to be there as well.
        """
        wanted = [each for number, message in enumerate(messages) for each in self._texts(message, number in learned)]
        wanted += [("the row's tools", "calls", (_name(tool),)) for tool in tools if _name(tool)]
        left = _squeezed(text)
        for what, remedy, forms in sorted(wanted, key=lambda each: -len(each[2][0])):
            found = next((form for each in forms if (form := _squeezed(each)) in left), None)
            if found is None:
                return f"the chat template writes nothing of {what}: {REMEDIES[remedy]}"
            left = left.replace(found, "\0", 1) if found else left
        return None

    def _texts(self, message: Spoken, learned: bool) -> Iterator[Text]:
        """The texts of a message that have to be in the rendered text."""
        role = message["role"]
        *thoughts, said = THINK.split(message["content"]) if role == "assistant" else [message["content"]]
        yield f"a message of the role {role}", "role", _forms(said)  # Llama 3.1's writes what a tool says as JSON
        if learned or (thoughts and not self._writes_thought("content")):
            yield from ((f"the thoughts in a message of the role {role}", "dropped", (each,)) for each in thoughts)
        for key in THOUGHTS:
            if message.get(key) and (learned or not self._writes_thought(key)):
                yield f"{key!r} of a message of the role {role}", "thought", (message[key],)
        for call in message.get("tool_calls", ()):
            for each in [call["function"]["name"], *_leaves(call["function"]["arguments"])]:
                yield "a tool call", "calls", _forms(each)

    def _writes_thought(self, key: str) -> bool:
        """Whether it writes the thoughts of a last answer that stand in this key of the message."""
        if key not in self._writes:
            from qerl.checkpoint.sandbox import SandboxError, render_text

            thought = {"content": f"<think>{PROBE}</think>a"} if key == "content" else {"content": "a", key: PROBE}
            asked = [{"role": "user", "content": "q"}, {"role": "assistant", **thought}]
            try:
                text = render_text(self._tokenizer, asked, False, switches=self._switches)
            except SandboxError:
                text = ""
            self._writes[key] = PROBE in text
        return self._writes[key]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def _leaves(value: Any) -> Iterator[Any]:
    """The names and values of a call's arguments."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif value is not None:
        yield value


def _forms(value: Any) -> tuple[str, ...]:
    """How a name or value may stand in a call: as it is, in JSON, in JSON within JSON, or as Python writes it."""
    if not isinstance(value, str):
        return str(value), json.dumps(value, default=str)
    plain, ascii_only = json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]
    twice = json.dumps(plain, ensure_ascii=False)[1:-1]
    return value, plain, ascii_only, twice, repr(value)[1:-1]
