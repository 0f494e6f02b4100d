"""The messages of a row, in the forms in which others store them; RL, SFT and evaluation read them here.

A message is {"role": "user", "content": text}, its content perhaps OpenAI's list of parts, or ShareGPT's {"from":
"human", "value": text}. The list may be JSON text. Tool calls and thoughts beside the content are kept. Of Alpaca's
rows, `instruction` and `input` ask, and `output` is the answer.

`Written` finds what of a row the chat template has left out. Some templates pass over a role, tool calls, tools or
thoughts without a word, and the model would learn something else than the row says. So each text of the row is looked
for in the rendered text. Only thoughts of earlier answers may be missing, where the template writes those of a last
one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qerl.base.isolate import short
from qerl.base.sandbox import SandboxError, render_text, unguarded
from qerl.data.rows import is_empty, without_nulls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    **{"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"},
    **{"function_call": "assistant", "observation": "tool", "tool": "tool"},
}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # thoughts beside the content
OTHER_THOUGHTS = re.compile(r"thought|think|reason|rationale|scratchpad|chain_of|(?:^|_)cot(?:$|_)", re.IGNORECASE)
NO_TEXT = ("image", "images", "audio", "audios", "video", "videos")
LEARNED = ("weight", "train", "training", "loss")  # 0 or false: this message is not learned
UNCLEAR = ("loss_mask", "mask", "loss_weight", "loss_scale", "train_detail", "train_on", "trainable", "learn", "masked")

SYSTEM = ("system", "system_prompt")  # columns beside a question or messages
MEANT = re.compile(r"""[\s\ufeff"']*[\[{][\s\[{(\\]*["'](?:role|from|messages|conversations)\\*["']\s*:""")
SAID = re.compile(r"""["'](?:content|value)\\*["']\s*:""")

Spoken = dict[str, Any]  # a message: role, content, and what a template reads of it besides


class UnusableError(ValueError):
    """Why a row cannot be used: the reason it is counted under, and what is said of this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass(frozen=True)
class Asked:
    """The last message of the user, those `earlier`, and the assistant's `reply` to it, if it is there.

    `beside` is what the last message holds beside its role and content, such as a name. `conversational` says whether
    the row has messages; else its question is a text.
    """

    question: str
    earlier: tuple[Spoken, ...] = ()
    reply: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)
    conversational: bool = False


def as_messages(cell: Any) -> list[Any] | None:
    """The list that a cell holds, as it is, as an array, or as JSON text of messages; None if it holds none."""
    if hasattr(cell, "tolist"):  # numpy's, in rows that a program gives
        cell = cell.tolist()
    if not isinstance(cell, str):
        return list(cell) if isinstance(cell, list | tuple) else None
    if not cell.lstrip().startswith(("[", '"[')):  # the latter: written as JSON twice
        return None
    try:
        found = json.loads(cell)
        found = json.loads(found) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list):
        return None
    spoken = [isinstance(each, Mapping) and ("role" in each or "from" in each) for each in found]
    return found if spoken and all(spoken) else None


def check_text(text: str, column: str) -> None:
    """Raise UnusableError for a text that is half a character short, or means messages and is not read as such."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnusableError("half a character", f"its column {column!r} holds half a character") from None
    if MEANT.match(text) and SAID.search(text):
        raise UnusableError(
            "messages that are no list in JSON",
            f"its column {column!r} is {short(text)}: write messages as a list, or as its JSON text",
        )


def read_messages(cell: Sequence[Any]) -> Asked:
    """The messages of a row. Raises UnusableError, in words, for what is not a chat that a model can continue."""
    messages = [read_message(each, number) for number, each in enumerate(cell, start=1)]
    reply = ""
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        reply = last["content"] if is_learned(cell[-1], len(cell)) else ""  # one that is not learned is not right
    if not messages or messages[-1]["role"] != "user":
        last = f"the last one is of the role {messages[-1]['role']!r}" if messages else "there is none of the user"
        raise UnusableError("messages that cannot be asked", f"its messages ask nothing: {last}")
    *earlier, last = messages
    beside = {key: value for key, value in last.items() if key not in ("role", "content")}
    return Asked(last["content"].strip(), tuple(earlier), reply.strip(), beside, conversational=True)


def with_system(row: Mapping[str, Any], messages: Sequence[Spoken]) -> list[Spoken]:
    """The messages, with the row's column `system` or `system_prompt` before them as the system message.

    Raises UnusableError if the column holds no text, or another text than the system message that they have.
    """
    column = next((name for name in SYSTEM if not is_empty(row.get(name))), None)
    if column is None:
        return list(messages)
    text = text_of(row[column])
    if text is None:
        raise UnusableError(f"a column {column} that is no text", f"its column {column!r} is {short(row[column])}")
    check_text(text, column)
    own = [each["content"] for each in messages if each["role"] == "system"]
    if own and text.strip() not in map(str.strip, own):
        raise UnusableError(
            "two system messages", f"its column {column!r} is another text than its system message: keep one of them"
        )
    return list(messages) if own else [{"role": "system", "content": text}, *messages]


def read_message(value: Any, number: int) -> Spoken:
    """A message with its role and content, and its name, thoughts and tool calls. Raises UnusableError."""
    given = value if isinstance(value, Mapping) else {}
    role, content, calls = given.get("role"), given.get("content"), given.get("tool_calls")
    if is_empty(role) and not is_empty(given.get("from")):
        role, content = SHAREGPT.get(str(given["from"])), given.get("value")
        if given["from"] == "function_call":
            calls, content = _calls_of_text(content, number), None
    if is_empty(calls) and not is_empty(given.get("function_call")):  # OpenAI's form before tool calls
        calls = [{"function": given["function_call"]}]
    calls = [] if is_empty(calls) else [_call(each, number) for each in _listed(calls, number)]
    nothing = not isinstance(content, str) and is_empty(content)
    text = "" if nothing and calls else text_of(content)
    wrong = f"its message {number} is no object with a role ({', '.join(ROLES)}) and a text as content"
    if role not in ROLES:
        said = next((key for key in ("role", "from") if not is_empty(given.get(key))), None)
        if said is None:
            raise UnusableError("a message without a role", wrong)
        known = ", ".join(ROLES if said == "role" else (*SHAREGPT,))
        raise UnusableError(
            "a message of an unknown role", f"its message {number} has {said!r} {given[said]!r}: write one of {known}"
        )
    if text is None:
        raise UnusableError("a message without a text", wrong)
    if other := next((key for key in NO_TEXT if not is_empty(given.get(key))), None):
        raise UnusableError("a message with more than text", f"its message {number} has {other!r}, and text is read")
    for key in given:
        if key not in THOUGHTS and OTHER_THOUGHTS.search(str(key)) and not is_empty(given[key]):
            raise UnusableError(
                "thoughts in a key that is not read",
                f"its message {number} has {str(key)[:40]!r}: call it reasoning_content, or write it into the content",
            )
    spoken: Spoken = {"role": role, "content": text}
    for key in ("name", "tool_call_id", *THOUGHTS):
        if is_empty(given.get(key)):
            continue
        if not isinstance(given[key], str):
            raise UnusableError(
                f"a message whose {key} is no text", f"its message {number} has a {key} that is no text"
            )
        spoken[key] = given[key]
    if calls:
        spoken["tool_calls"] = calls
    try:
        json.dumps(spoken, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise UnusableError("half a character", f"its message {number} holds half a character") from None
    return spoken


def is_learned(value: Any, number: int) -> bool:
    """Whether a message may be learned: not if its `weight`, `train` or `loss` is 0 or false.

    Raises UnusableError for another value of these keys, for other keys of that kind, whose meaning is not the same in
    all tools, and for one that asks to learn a message which is not the assistant's.
    """
    given = value if isinstance(value, Mapping) else {}
    said = {key: given[key] for key in (*LEARNED, *UNCLEAR) if not is_empty(given.get(key))}
    for key, asked in said.items():
        if key in UNCLEAR or not isinstance(asked, int | float) or asked not in (0, 1):
            raise UnusableError(
                "a message that does not say clearly whether it is learned",
                f"its message {number} has {key!r}: {str(asked)[:40]!r}; write weight 0 or 1, or remove the key",
            )
    wanted = [key for key, asked in said.items() if asked]
    spoken_by = given.get("role") or SHAREGPT.get(str(given.get("from")))
    if spoken_by != "assistant" and set(wanted) - {"weight"}:
        raise UnusableError(
            "a message to be learned that is not the assistant's",
            f"its message {number} has {wanted[0]!r} and the role {spoken_by!r}; only the assistant's are learned",
        )
    return len(wanted) == len(said)


def text_of(content: Any) -> str | None:
    """The text of a content, whose parts follow one another; None for what is not text, such as a picture."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return "".join(parts) if parts and all(isinstance(part, str) for part in parts) else None


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The schemas of a column `tools`, also as JSON text. Raises UnusableError for what is not a list of objects."""
    if is_empty(value):
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UnusableError("tools that are no JSON") from None
        value = [] if value is None else value
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise UnusableError("tools that are no list of schemas", f"its tools are {short(value)}")
    return tuple(_tool(without_nulls(each)) for each in value)


def tools_of(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The schemas beside messages: of the column `tools`, or of `functions`, OpenAI's form before it."""
    return read_tools(row.get("functions") if is_empty(row.get("tools")) else row.get("tools"))


def _tool(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema in the form that templates read, {"type": "function", "function": {"name": ...}}."""
    if "function" not in schema:  # the function alone, as in ShareGPT's rows
        schema = {"type": "function", "function": {key: value for key, value in schema.items() if key != "type"}}
    if not _name(schema):
        raise UnusableError("a tool without a name", f"its tools hold {short(schema)}")
    return schema


def _listed(calls: Any, number: int) -> list[Any]:
    if isinstance(calls, str):
        return _calls_of_text(calls, number)
    calls = calls.tolist() if hasattr(calls, "tolist") else calls
    return list(calls) if isinstance(calls, list | tuple) else [calls]


def _calls_of_text(text: Any, number: int) -> list[Any]:
    """The tool calls that a JSON text holds, one {"name", "arguments"} or a list of them."""
    found = _json(text, number)
    return [
        {"function": each} if isinstance(each, Mapping) and "name" in each else each
        for each in (found if isinstance(found, list) else [found])
    ]


def _json(text: Any, number: int) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise UnusableError(
            "a tool call that is no JSON", f"its message {number} has a tool call whose arguments are no JSON"
        ) from None


def _call(value: Any, number: int) -> dict[str, Any]:
    """A tool call whose arguments are an object, which templates write; OpenAI keeps them as a text."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnusableError("a tool call without a name", f"its message {number} has a tool call without a name")
    arguments = function.get("arguments")
    arguments = {} if is_empty(arguments) else arguments
    arguments = _json(arguments, number) if isinstance(arguments, str) else without_nulls(arguments)
    call, function = without_nulls(value), without_nulls(function)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
HISTORY = "history"  # earlier questions and answers, which LLaMA-Factory's rows may hold besides


def with_input(row: Mapping[str, Any], column: str, text: str, answer: str | None = None) -> str:
    """The text of a row's `column`, with its input below it if that is an instruction with one.

    `answer` is the column of answers. Raises UnusableError for a row with a history.
    """
    if column == INSTRUCTION and not is_empty(row.get(HISTORY)):
        raise UnusableError(
            f"an instruction with the column {HISTORY}",
            f"its column {HISTORY!r} would not be asked; write the row as `messages`, or remove the column",
        )
    if column != INSTRUCTION or INPUT not in row or answer == INPUT:
        return text
    if is_empty(row[INPUT]):
        return text
    if not isinstance(row[INPUT], str):
        raise UnusableError("an input that is no text", f"its column 'input' is a {type(row[INPUT]).__name__}")
    return f"{text.strip()}\n\n{row[INPUT].strip()}"


THINK = re.compile(r"</?think(?:ing)?>")
PROBE = "QERL7PROBE3"
REMEDIES = {
    "role": "give such messages a role that the template writes, such as system",
    "name": "write names into the contents, or leave them out of the rows",
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
        left = _squeezed(unguarded(text))
        for what, remedy, forms in sorted(wanted, key=lambda each: -len(each[2][0])):
            found = next((form for each in forms if (form := _squeezed(unguarded(each))) in left), None)
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
        if message.get("name") and role != "tool":  # few templates write the tool's, which its call has said
            yield f"the name in a message of the role {role}", "name", (message["name"],)
        for key in THOUGHTS:
            if message.get(key) and (learned or not self._writes_thought(key)):
                yield f"{key!r} of a message of the role {role}", "thought", (message[key],)
        for call in message.get("tool_calls", ()):
            for each in [call["function"]["name"], *_leaves(call["function"]["arguments"])]:
                yield "a tool call", "calls", _forms(each)

    def _writes_thought(self, key: str) -> bool:
        """Whether it writes the thoughts of a last answer that stand in this key of the message."""
        if key not in self._writes:
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
