"""An environment behind a URL, as OpenEnv serves it: POST URL/reset and POST URL/step, JSON in and out.

    reset  {"episode_id": "...", "seed": 1, "example": {...}}
    step   {"episode_id": "...", "action": {"message": "what it wrote"}}
    both answer {"observation": ..., "reward": 0, "done": false}

A server of several episodes tells them apart by `episode_id`. An observation is text, or a mapping with the text under
`observation_key`; any other is shown as JSON. Messages stand under the key `messages`.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any

from qerl.environments.driven import BadEnvironmentError, messages_of, number
from qerl.environments.values import Action, Reply
from qerl.errors import ConfigError

CONNECT_S = 10.0
LARGEST = 16 * 2**20  # bytes of an answer


def check_reachable(url: str) -> None:
    """Raise ConfigError if nothing listens at the server's address."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"environment {url} cannot be reached ({why}): start its server, or correct the URL"
        ) from error


class Remote:
    """One episode at a server. The deadline of a call is that of the episode; `timeout_s` bounds the connection."""

    def __init__(
        self, url: str, action_key: str = "message", observation_key: str = "text", timeout_s: float = 300.0
    ) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
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
        return Reply(messages, number(reply.get("reward")), bool(reply.get("done")), len(calls), len(action.mistakes))

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
        data = json.dumps(body, default=str).encode()
        request = urllib.request.Request(f"{self._url}/{what}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                read = response.read(LARGEST + 1)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(2000).decode("utf-8", "replace").split())
            raise BadEnvironmentError(f"got {error.code} from {self._url}/{what}: {said[:160]}") from None
        except OSError as error:
            raise BadEnvironmentError(f"got no answer from {self._url}/{what}: {error}") from None
        try:
            reply = json.loads(read) if len(read) <= LARGEST else None
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not reply.keys() & {"observation", "messages", "done"}:
            raise BadEnvironmentError(
                f"got {read[:80]!r} from {self._url}/{what}: answer with a JSON object of observation, reward and done"
            )
        return reply
