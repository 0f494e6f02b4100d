"""A reward whose name is a URL: a server that the user runs grades the completions.

    rewards: [{name: "http://localhost:8000/grade", weight: 1.0, args: {timeout_s: 10, retries: 3}}]

Each batch is one POST of JSON. Every list has one value per completion, in the same order:

    {"completions": [text], "prompts": [text], "questions": [text], "answers": [text], "rows": [number], "step": 12,
     "columns": {"level": [3]}}

`columns` holds what `args.columns: [level]` asks for: columns of the data, or completion_ids. `rows` has the same
number for all completions of one prompt. The answer is {"rewards": [0.0, 1.0, ...]} or the list alone, with one finite
number per completion.

A server that cannot be reached, is late or answers 408, 429 or 5xx is asked again after backoff_s, then after twice
that time, and so on, or after the time that its Retry-After asks for; any other error is final. `timeout_s` is the
deadline of a whole exchange, and an answer has at most LARGEST bytes. If no rewards come in the end, a RewardError
stops the run, which can be resumed from its last checkpoint. `headers` are sent along, with `${NAME}` replaced by a
variable of the environment (qerl/base/own/exchange.py). Nothing is sent anywhere but to that URL: a redirect is an
error, and the proxies that the environment names are used for other machines only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from qerl.base.errors import ConfigError, RewardError
from qerl.base.own.exchange import AskError, Headers, Server, ask, check_headers, check_patience, shown
from qerl.config.rewards import url_mistake, url_shown

SENT = {"prompts": "prompts", "question": "questions", "answer": "answers", "row": "rows"}  # column -> name in JSON
LARGEST = 16 * 2**20  # bytes of an answer: a million rewards in all their digits need 20 MB


class RewardServer:
    """The reward that the server at `url` gives. The keyword arguments with a default are the recipe's `args`."""

    def __init__(self, url: str) -> None:
        mistake = url_mistake(url)
        if mistake:
            raise ConfigError(f"reward {url_shown(url)!r}: {mistake}; write for example http://localhost:8000/grade")
        self.url = url

    def __call__(
        self,
        completions: Sequence[str],
        *,
        timeout_s: float = 60.0,
        retries: int = 3,
        backoff_s: float = 1.0,
        columns: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        **batch: Any,
    ) -> list[float]:
        """One reward per completion; `batch` is all that the run has beside them.

        Raises RewardError, and ConfigError if the data lacks one of `columns`.
        """
        asked = {
            "completions": list(completions),
            **{sent: list(batch[name]) for name, sent in SENT.items()},
            "step": batch["step"],
            "columns": {name: self._column(name, batch) for name in columns},
        }
        body = json.dumps(asked, default=str).encode()
        server = Server(
            f"reward server {self.url}", self.url, Headers(headers or {}), timeout_s, retries, backoff_s, LARGEST
        )
        try:
            (answer,) = ask(server, [body])
        except AskError as error:
            self._fail(error.what, error.write)
        return self._read(answer, len(completions), server.headers)

    def check_args(self, args: Mapping[str, Any]) -> None:
        """Raise ConfigError for values that `args` of the recipe cannot have."""
        try:
            check_patience(f"reward {self.url}", args)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        check_headers(f"reward {self.url}", args.get("headers", {}))
        columns = args.get("columns", ())
        if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
            raise ConfigError(f"reward {self.url}: args.columns is {columns!r}: write a list of names, such as [level]")

    def _column(self, name: str, batch: Mapping[str, Any]) -> list[Any]:
        known = sorted(key for key, values in batch.items() if isinstance(values, list) and key not in SENT)
        if name not in known:
            raise ConfigError(
                f"reward {self.url}: args.columns asks for {name!r}, which is no column of the data (what can be sent "
                f"besides: {', '.join(known)}); leave it out, or use data that has it"
            )
        return batch[name]

    def _read(self, answer: bytes, count: int, headers: Headers) -> list[float]:
        """The rewards in an answer to `count` completions."""
        write = f'answer {{"rewards": [...]}} with {count} finite numbers, 0 for a completion that it cannot judge'
        try:
            rewards = json.loads(answer)
        except (ValueError, RecursionError):
            self._fail(f"answered what is not JSON: {shown(answer, headers)}", write)
        if isinstance(rewards, dict):
            rewards = rewards.get("rewards")
        if not isinstance(rewards, list):
            self._fail(
                f"answered JSON that is neither a list nor has one as `rewards`: {shown(answer, headers)}", write
            )
        if len(rewards) != count:
            self._fail(f"answered {len(rewards)} rewards for {count} completions", write)
        for index, value in enumerate(rewards):
            if not _is_finite(value):
                got = shown(json.dumps(value, ensure_ascii=False), headers)
                self._fail(f"answered {got} for completion {index + 1} of {count}, no finite number", write)
        return [float(value) for value in rewards]

    def _fail(self, what: str, write: str) -> NoReturn:
        raise RewardError(
            f"reward server {self.url} {what}: {write}; then start again, or go on from the last checkpoint with "
            "`qerl train --resume RUN`"
        )


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float, bool) and math.isfinite(value)
    except OverflowError:  # JSON allows integers of any length
        return False
