"""An environment behind a URL, as OpenEnv serves it: POST URL/reset and POST URL/step, JSON in and out.

    reset  {"episode_id": "...", "seed": 1, "example": {...}}
    step   {"episode_id": "...", "action": {"message": "what it wrote"}}
    both answer {"observation": ..., "reward": 0, "done": false}

Each call is one exchange (qerl/base/http.py). It ends at its deadline whatever the server does, follows no
redirect, and is not tried again, since a step may have counted. `headers` are sent along, with `${NAME}` replaced by a
variable of the environment. A server of several episodes tells them apart by `episode_id`. An observation is text, or a
mapping with the text under `observation_key`; any other is shown as JSON. Messages stand under the key `messages`.
"""

import json
import socket
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from qerl.base.errors import ConfigError
from qerl.base.http import AskError, Server, ask, check_headers, shown, url_mistake, url_shown
from qerl.episodes.driven import Action, BadEnvironmentError, Reply, flag, messages_of, number

CONNECT_S = 10.0
LARGEST = 16 * 2**20  # bytes of an answer


def check_reachable(url: str) -> None:
    """Raise ConfigError for a URL that is none or holds a key, and if nothing listens at the server's address."""
    if mistake := url_mistake(url):
        raise ConfigError(f"environment {url_shown(url)!r}: {mistake}; write for example http://localhost:8000")
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"environment {url} cannot be reached ({why}): start its server, or correct the URL"
        ) from error


class Remote:
    """One episode at a server. The episode has a limit of its own for a call, which is given up after `timeout_s`."""

    def __init__(
        self,
        url: str,
        action_key: str = "message",
        observation_key: str = "text",
        timeout_s: float = 300.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Raises ConfigError for headers that cannot be sent, or name a variable that is not set."""
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = check_headers(f"environment {url}", headers or {})
        self._action_key, self._observation_key = action_key, observation_key
        self._episode = uuid.uuid4().hex

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        example = {name: value for name, value in row.items() if name != "prompt"}
        reply = self._ask("reset", {"episode_id": self._episode, "seed": seed, "example": example})
        if "messages" in reply:
            return Reply(prompt=messages_of(reply["messages"]))
        return Reply(self._messages(reply))

    def step(self, action: Action) -> Reply:
        calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in action.calls]
        sent = {self._action_key: action.text, **({"tool_calls": calls} if calls else {})}
        reply = self._ask("step", {"episode_id": self._episode, "action": sent})
        messages = messages_of(reply["messages"]) if "messages" in reply else self._messages(reply)
        return Reply(messages, number(reply.get("reward")), flag(reply.get("done")), len(calls), len(action.mistakes))

    def end(self) -> float:
        return 0.0

    def _messages(self, reply: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        seen = reply.get("observation")
        if isinstance(seen, Mapping):
            text = seen.get(self._observation_key)
            seen = text if isinstance(text, str) else json.dumps(seen, ensure_ascii=False) if seen else None
        return messages_of(seen)

    def _ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer. Raises BadEnvironmentError for one that is no JSON object of an environment."""
        url = f"{self._url}/{what}"
        server = Server(f"environment {self._url}", url, self._headers, self._timeout_s, 0, 1.0, LARGEST)
        try:
            (read,) = ask(server, [json.dumps(body, default=str).encode()])
        except AskError as error:
            raise BadEnvironmentError(f"got no answer from {url}: it {error.what}") from None
        try:
            reply = json.loads(read)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or not reply.keys() & {"observation", "messages", "done"}:
            said = shown(read, self._headers)
            raise BadEnvironmentError(
                f"got {said!r} from {url}: answer with a JSON object of observation, reward and done"
            )
        return reply
