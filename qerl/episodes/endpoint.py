"""Messages -> token ids by the model's chat template, and back; and programs that ask the model over OpenAI's protocol.

Nothing is tokenized again. A prompt is rendered once; after that only what an environment says is rendered, as what
follows a turn of the assistant in the template. The turn itself stays the tokens that were sampled.

Tool calls are read as Qwen and Hermes write them, <tool_call>{"name": ..., "arguments": {...}}</tool_call>; as Llama 3
writes them, where the whole turn is {"name": ..., "parameters": {...}}; or by the tokenizer's own `response_template`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from qerl.base.errors import CheckpointError
from qerl.base.sandbox import SandboxError, encode, render_text
from qerl.checkpoint.load import CompletionText
from qerl.data.messages import text_of
from qerl.episodes.driven import Action, BadEnvironmentError, Call, Message, Reply, Schema, called, number

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

    def said(self, text: str) -> list[int]:
        """Token ids of a turn in which the model says a text."""
        return [*self._encode(text), self.end_id]

    def action(self, token_ids: Sequence[int]) -> Action:
        """What the model wrote in a turn."""
        ids = list(token_ids)
        while ids and ids[-1] in self._end_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if self._parse is None:
            return Action(self._text(ids))
        return self._parse(text, ids)

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
        try:
            return render_text(self._tokenizer, messages, True, self._schemas if tools else None, self._switches)
        except SandboxError as error:
            roles = [message["role"] for message in messages]
            raise CheckpointError(
                "the chat template of %r refuses messages with the roles %s: %s; use a model whose template has them",
                *(self._tokenizer.name_or_path, roles, error),
            ) from error

    def _encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, text.encode(errors="replace").decode())

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
    return _action(text, HERMES.findall(text), "arguments")


def llama(text: str) -> Action:
    """A turn that is a call and nothing else; several may be divided by semicolons."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    pieces = re.split(r"(?<=\})\s*;\s*(?=\{)", body) if body.startswith('{"name"') else []
    return _action(text, pieces, "parameters")


def _action(text: str, pieces: Sequence[str], key: str) -> Action:
    found = [_call(piece, key) for piece in pieces]
    calls = tuple(each for each in found if isinstance(each, Call))
    return Action(text, calls, tuple(each for each in found if not isinstance(each, Call)))


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


LARGEST = 16 * 2**20  # bytes of a request
MOST_ASKING = 64  # requests of one episode that may wait at once, although only the first can go on
MOST_CONNECTIONS = 4096
READ_S = 60.0  # that a connection may take to send the next bytes of a request
PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # is not counted here
MODEL = "policy"  # the name that answers give the model; requests may name any

_starting = threading.Lock()
_running: _Server | None = None


def is_program(found: Callable[..., Any]) -> bool:
    """Whether a function that an environment names asks a model by a URL."""
    return inspect.isroutine(found) and "base_url" in inspect.signature(found).parameters


class Programmed:
    """One episode of a program that asks its model over OpenAI's protocol: what it gets is what the policy writes.

        async def solve(base_url, example):                     # recognised by its argument `base_url`
            client = AsyncOpenAI(base_url=base_url, api_key="none")
            ...                                                 # asks as often as it likes
            return reward

    So agents, and environments of libraries that sample by themselves (verifiers), run as they are. The program runs in
    a thread of its own, and waits there while the model writes. Its first request has the messages that stand in place
    of the row's prompt; each further one has to go on from the one before: the same messages, the model's turn, and
    what is new. What a request says of sampling is not followed: the recipe says it. Tools are those whose schemas the
    program has in an attribute `tools`, as OpenAI writes them.
    """

    def __init__(self, program: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self._program, self._args, self._schemas = program, args, list(getattr(program, "tools", ()))
        self._events: SimpleQueue[tuple[str, Any]] = SimpleQueue()  # what the program did last
        self._turns: SimpleQueue[Action | None] = SimpleQueue()  # None: there will be no more, and it stays there
        self._asking = threading.BoundedSemaphore(MOST_ASKING)
        self._seen: list[Message] = []
        self._id = uuid.uuid4().hex
        self._server: _Server | None = None  # once the episode has begun

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        self._server = server = _server()
        server.episodes[self._id] = self
        given = {**row, **self._args, "base_url": f"http://127.0.0.1:{server.server_port}/{self._id}/v1"}
        threading.Thread(target=self._run, args=(given, seed), name="environment", daemon=True).start()
        what, value = self._events.get()
        if what != "asked":
            self._over(what, value)
            raise BadEnvironmentError("ended without asking the model: nothing could be trained")
        self._seen = value
        return Reply(prompt=tuple(value))

    def step(self, action: Action) -> Reply:
        self._turns.put(action)
        what, value = self._events.get()
        counts = {"tool_calls": len(action.calls) + len(action.mistakes), "tool_errors": len(action.mistakes)}
        if what != "asked":
            return Reply(reward=self._over(what, value), done=True, **counts)
        new = value[len(self._seen) + 1 :]
        if not _goes_on(self._seen, value):
            self.abandon()
            raise BadEnvironmentError(
                "asked with messages that do not go on from those before: send the same messages, the model's turn, "
                "and what is new"
            )
        self._seen = value
        return Reply(tuple(new), **counts)

    def end(self) -> float:
        self.abandon()
        return 0.0

    def abandon(self) -> None:
        """Let a program that still waits for the model fail, so that its thread ends."""
        self._turns.put(None)
        if self._server is not None:
            self._server.episodes.pop(self._id, None)

    def asked(self, body: Any) -> Message | None:
        """The model's turn after the messages of a request; None if there is none. Raises ValueError for a bad one."""
        if not isinstance(body, Mapping):
            raise ValueError("a request is a JSON object")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("a request needs messages")
        if (body.get("n") or 1) != 1:
            raise ValueError("there is one answer: leave out n")
        if (tools := [tool.get("function", {}).get("name") for tool in body.get("tools") or ()]) != (
            own := [schema["function"]["name"] for schema in self._schemas]
        ):
            raise ValueError(f"the request has the tools {tools}, and the program's attribute `tools` names {own}")
        plain = _plain(messages)
        if not self._asking.acquire(blocking=False):
            raise ValueError(f"{MOST_ASKING} requests of this episode wait already: ask once the last one is answered")
        try:
            self._events.put(("asked", plain))
            action = self._turns.get()
            if action is None:
                self._turns.put(None)  # for all others that wait
        finally:
            self._asking.release()
        return None if action is None else _openai(action)

    def _run(self, given: Mapping[str, Any], seed: int) -> None:
        try:
            event = ("returned", called(self._program, given, seed))
        except BaseException as error:
            event = ("raised", error)
        self._events.put(event)

    def _over(self, what: str, value: Any) -> float:
        """The reward of a program that has ended. Raises what it raised."""
        self.abandon()
        if what == "raised":
            raise value
        return number(value)


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """OpenAI's messages as chat templates take them: text in place of parts, tools by name, arguments as mappings."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        content = message.get("content")
        if content and (content := text_of(content)) is None:
            raise ValueError("the content of a message is text, or parts of text")
        plain: Message = {"role": str(message.get("role")), "content": content or ""}
        for call in message.get("tool_calls") or ():
            names[call.get("id", "")] = call["function"]["name"]
        if plain["role"] == "tool":
            plain["name"] = message.get("name") or names.get(message.get("tool_call_id", ""), "tool")
        plain["role"] = "system" if plain["role"] == "developer" else plain["role"]
        found.append(plain)
    return found


def _goes_on(before: Sequence[Message], now: Sequence[Message]) -> bool:
    """Whether `now` is `before`, a turn of the assistant, and more. Turns of the assistant may be shown in part."""
    if len(now) < len(before) + 2 or now[len(before)]["role"] != "assistant":
        return False
    pairs = zip(before, now, strict=False)
    return all(old == new or old["role"] == new["role"] == "assistant" for old, new in pairs)


def _openai(action: Action) -> Message:
    """A turn of the model as OpenAI writes it."""
    message: Message = {"role": "assistant", "content": action.text}
    if action.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{uuid.uuid4().hex[:12]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in action.calls
        ]
    return message


def _reason(message: Message) -> str:
    return "tool_calls" if "tool_calls" in message else "stop"


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}


def _chunks(message: Message) -> list[dict[str, Any]]:
    """A turn for a request that streams: all of it at once, how it ended, and its usage."""
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    head = _head("chat.completion.chunk")
    choices = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": _reason(message)},
    ]
    return [*({**head, "choices": [choice]} for choice in choices), {**head, "choices": [], "usage": USAGE}]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.episodes: dict[str, Programmed] = {}
        self._connections = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def verify_request(self, *_: object) -> bool:
        """A connection beyond those that are allowed is closed."""
        return self._connections.acquire(blocking=False)

    def handle_error(self, *given: Any) -> None:
        """A client that has gone before its answer came is no error of the run."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*given)

    def process_request_thread(self, *given: Any) -> None:
        """Answer in a thread of its own."""
        try:
            super().process_request_thread(*given)
        finally:
            self._connections.release()


class _Handler(BaseHTTPRequestHandler):
    """Answers POST /EPISODE/v1/chat/completions with what the policy writes in that episode."""

    timeout = READ_S

    def do_POST(self) -> None:
        episode, _, rest = self.path.strip("/").partition("/")
        found = self.server.episodes.get(episode)
        if found is None or f"/{rest}" != PATH:
            self._send(404, {"error": {"message": f"there is no {self.path} here: POST to {PATH} of an open episode"}})
            return
        try:
            body = json.loads(self.rfile.read(self._length()))
            message = found.asked(body)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            self._send(400, {"error": {"message": str(error)[:500]}})
            return
        if message is None:
            self._send(410, {"error": {"message": "the episode is over"}})
        elif body.get("stream"):
            events = [*map(json.dumps, _chunks(message)), "[DONE]"]
            self._write(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())
        else:
            choice = {"index": 0, "message": message, "finish_reason": _reason(message), "logprobs": None}
            self._send(200, {**_head("chat.completion"), "choices": [choice], "usage": USAGE})

    def _length(self) -> int:
        """The bytes of the request. Raises ValueError for what would be read without an end."""
        said = self.headers.get("Content-Length", "")
        if not (said.isascii() and said.isdigit()) or len(said) > 20 or int(said) > LARGEST:
            raise ValueError(f"a request needs a Content-Length of at most {LARGEST} bytes, and has {said[:40]!r}")
        return int(said)

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        self._write(status, "application/json", json.dumps(body).encode())

    def _write(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing is written to stderr."""


def _server() -> _Server:
    """The server of this process, which begins with the first episode."""
    global _running
    with _starting:
        if _running is None:
            _running = _Server()
            threading.Thread(target=_running.serve_forever, name="endpoint", daemon=True).start()
    return _running
