"""Messages -> token ids by the model's chat template, and the model's token ids -> text and tool calls.

Nothing is tokenized again. A prompt is rendered once; after that only what an environment says is rendered, as what
follows a turn of the assistant in the template. The turn itself stays the tokens that were sampled.

Tool calls are read as Qwen and Hermes write them, <tool_call>{"name": ..., "arguments": {...}}</tool_call>; as Llama 3
writes them, where the whole turn is {"name": ..., "parameters": {...}}; or by the tokenizer's own `response_template`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError
from qerl.checkpoint.chat_template import CompletionText
from qerl.episodes.values import Action, Call, Message, Schema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN = "\x02turn{}\x02"  # stands for what the model wrote, with a number that makes it one that nobody else wrote
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Chat:
    """The chat template of one model, with the tools that its prompts show."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[Schema],
        end_ids: Sequence[int],
        switches: Mapping[str, Any] | None = None,
    ) -> None:
        """`end_ids` end a turn; `switches` are variables of the template.

        Raises CheckpointError if there are tools and the template has no place for them.
        """
        self._switches = switches
        self._tokenizer, self._schemas, self._end_ids = tokenizer, list(schemas), set(end_ids)
        self._text = CompletionText(tokenizer, end_ids)
        self.end_id = next(iter(end_ids))
        self._after: dict[str, list[int]] = {}
        self._longest: int | None = None
        self._parse = _parser(tokenizer) if schemas else None
        if schemas:
            self._check_tools()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages, with the tools, up to where the model's turn begins."""
        return self._encode(self._render(messages, tools=True))

    def suffix(self, messages: Sequence[Message], last: int | None) -> list[int]:
        """Token ids that follow a turn whose last token is `last`: the messages, and the next turn's beginning."""
        key = json.dumps([list(messages), last in self._end_ids and last], default=str)
        if key not in self._after:
            if len(self._after) > 4096:
                self._after.clear()
            self._after[key] = self._suffix(messages, last)
        return self._after[key]

    def action(self, token_ids: Sequence[int]) -> Action:
        """What the model wrote in a turn."""
        ids = list(token_ids)
        while ids and ids[-1] in self._end_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if self._parse is None:
            return Action(self._text(ids))
        return self._parse(text, ids)

    def cut(self, text: str, limit: int) -> str | None:
        """The beginning of a text that has more than `limit` tokens; None if it has no more."""
        ids = self._encode(text)
        return None if len(ids) <= limit else self._tokenizer.decode(ids[:limit], skip_special_tokens=False)

    def most_characters(self, tokens: int) -> int:
        """More characters than `tokens` tokens can stand for."""
        if self._longest is None:
            self._longest = max(map(len, self._tokenizer.get_vocab()))
        return (tokens + 1) * self._longest

    def check(self) -> None:
        """Raise CheckpointError if the template takes no messages whatever."""
        user = [{"role": "user", "content": "."}]
        self.prompt(user)
        self.suffix(user, None)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without those that end a turn or pad."""
        return self._text(token_ids)

    def _suffix(self, messages: Sequence[Message], last: int | None) -> list[int]:
        said = json.dumps(list(messages), ensure_ascii=False, default=str)
        mark = next(mark for mark in map(TURN.format, itertools.count()) if json.dumps(mark)[1:-1] not in said)
        dummy = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
        text = self._render([*dummy, *messages], tools=False)
        if text.count(mark) != 1:
            raise CheckpointError(
                "the chat template of %r does not show an assistant's message as it is, so that nothing can follow "
                "one: use a model whose template does",
                self._tokenizer.name_or_path,
            )
        ids = self._encode(text.partition(mark)[2])
        return ids[1:] if ids and ids[0] == last else ids

    def _render(self, messages: Sequence[Message], tools: bool) -> str:
        from qerl.checkpoint.sandbox import SandboxError, render_text

        try:
            return render_text(self._tokenizer, messages, True, self._schemas if tools else None, self._switches)
        except SandboxError as error:
            roles = [message["role"] for message in messages]
            raise CheckpointError(
                "the chat template of %r refuses messages with the roles %s: %s; use a model whose template has them",
                *(self._tokenizer.name_or_path, roles, error),
            ) from error

    def _encode(self, text: str) -> list[int]:
        text = text.encode(errors="replace").decode()
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check_tools(self) -> None:
        name = self._schemas[0]["function"]["name"]
        messages = [{"role": "user", "content": "."}]
        if name not in self._render(messages, tools=True) or self._parse is None:
            raise CheckpointError(
                "the chat template of %r has no tools (their names do not appear in a prompt, or calls are written in "
                "no form that is known): use a model whose template has them, such as Qwen2.5 or Qwen3, or an "
                "environment with a step of its own",
                self._tokenizer.name_or_path,
            )
        self.suffix([{"role": "tool", "name": name, "content": "."}], None)


def _parser(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The function of (text, ids) that finds tool calls; None if the template writes them in no known form."""
    template = tokenizer.get_chat_template()
    if "<tool_call>" in template and "<function=" not in template:
        return lambda text, ids: hermes(text)
    if "<|python_tag|>" in template or '"parameters"' in template:
        return lambda text, ids: llama(text)
    if getattr(tokenizer, "response_template", None) is not None:
        return lambda text, ids: _by_template(tokenizer, text, ids)
    return None


def hermes(text: str) -> Action:
    """The calls between <tool_call> and </tool_call>."""
    calls, mistakes = [], []
    for found in HERMES.findall(text):
        call = _call(found, "arguments")
        calls.append(call) if isinstance(call, Call) else mistakes.append(call)
    return Action(text, tuple(calls), tuple(mistakes))


def llama(text: str) -> Action:
    """A turn that is a call and nothing else; several may be divided by semicolons."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith('{"name"'):
        return Action(text)
    pieces = re.split(r"(?<=\})\s*;\s*(?=\{)", body)
    found = [_call(piece, "parameters") for piece in pieces]
    return Action(
        text, tuple(c for c in found if isinstance(c, Call)), tuple(c for c in found if not isinstance(c, Call))
    )


def _call(text: str, key: str) -> Call | str:
    """The call that a JSON text is, or what is wrong with it."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"the call is no JSON: {error}"
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return "the call has no name"
    arguments = value.get(key, value.get("arguments", {}))
    if not isinstance(arguments, Mapping):
        return f"the {key} are no JSON object"
    return Call(value["name"], dict(arguments))


def _by_template(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> Action:
    try:
        calls = (tokenizer.parse_response(list(ids)) or {}).get("tool_calls") or []
        found = [(call["function"]["name"], call["function"].get("arguments") or {}) for call in calls]
        return Action(text, tuple(Call(name, dict(arguments)) for name, arguments in found))
    except (ValueError, TypeError, KeyError) as error:
        return Action(text, (), (f"the call cannot be read: {error}",))
