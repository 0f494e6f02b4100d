"""A reward whose name is a URL: a server that the user runs grades the completions.

    rewards: [{name: "http://localhost:8000/grade", weight: 1.0, args: {timeout_s: 10, retries: 3}}]

Each batch is one POST of JSON. Every list has one value per completion, in the same order:

    {"completions": [text], "prompts": [text], "questions": [text], "answers": [text], "rows": [number], "step": 12,
     "columns": {"level": [3]}}

`columns` holds what `args.columns: [level]` asks for: columns of the data, or completion_ids. `rows` has the same
number for all completions of one prompt. The answer is {"rewards": [0.0, 1.0, ...]} or the list alone, with one finite
number per completion.

A server that cannot be reached, is late or answers 408, 429 or 5xx is asked again after backoff_s, then after twice
that time, and so on; any other error is final. If no rewards come in the end, a RewardError stops the run, which can be
resumed from its last checkpoint. Nothing is sent anywhere but to that URL: a redirect is an error, and the proxies that
the environment names are used for other machines only.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from qerl.config.rules_rewards import url_mistake
from qerl.errors import ConfigError, RewardError

RETRIED = (408, 429)  # request timeout, too many requests; every 5xx is retried too
LONGEST_PAUSE_S = 30.0
SENT = {"prompts": "prompts", "question": "questions", "answer": "answers", "row": "rows"}  # column -> name in JSON
SHOWN = 80  # characters of an answer that an error shows

logger = logging.getLogger(__name__)


class _UnavailableError(Exception):
    """The server did not answer this time, but may if it is asked again."""


class RewardServer:
    """The reward that the server at `url` gives. The keyword arguments with a default are the recipe's `args`."""

    def __init__(self, url: str) -> None:
        mistake = url_mistake(url)
        if mistake:
            raise ConfigError(f"reward {url!r}: {mistake}; write for example http://localhost:8000/grade")
        self.url = url
        self._proxies = urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1")

    def __call__(
        self,
        completions: Sequence[str],
        *,
        timeout_s: float = 60.0,
        retries: int = 3,
        backoff_s: float = 1.0,
        columns: Sequence[str] = (),
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
        return self._read(self._post(body, timeout_s, retries, backoff_s), len(completions))

    def check_args(self, args: Mapping[str, Any]) -> None:
        """Raise ConfigError for values that `args` of the recipe cannot have."""
        for key in ("timeout_s", "backoff_s"):
            value = args.get(key, 1)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ConfigError(f"reward {self.url}: args.{key} is {value!r}: write a number of seconds above 0")
        retries, columns = args.get("retries", 0), args.get("columns", ())
        if type(retries) is not int or retries < 0:
            raise ConfigError(f"reward {self.url}: args.retries is {retries!r}: write 0 or a whole number above")
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

    def _post(self, body: bytes, timeout_s: float, retries: int, backoff_s: float) -> bytes:
        for attempt in range(retries + 1):
            try:  # by hand: httpx retries connections only, not late answers nor 429 and 5xx
                return self._post_once(body, timeout_s)
            except _UnavailableError as error:
                reason = str(error)
            if attempt < retries:
                pause = min(backoff_s * 2**attempt, LONGEST_PAUSE_S)
                logger.warning("reward server %s %s; asked again in %g s", self.url, reason, pause)
                time.sleep(pause)
        times = f"{retries + 1} times" if retries else "once"
        self._fail(f"{reason} (asked {times})", "start it, correct its URL, or raise args.timeout_s or args.retries")

    def _post_once(self, body: bytes, timeout_s: float) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        deadline = time.monotonic() + timeout_s
        try:
            with httpx.stream(
                "POST", self.url, content=body, headers=headers, timeout=timeout_s, trust_env=self._proxies
            ) as response:
                answer = _read_until(response, deadline)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _UnavailableError(f"did not answer within {timeout_s:g} s") from error
        except httpx.ConnectError as error:
            raise _UnavailableError(f"cannot be reached ({error})") from error
        except httpx.RequestError as error:  # the connection broke, or the answer is not HTTP
            raise _UnavailableError(f"broke off ({error or type(error).__name__})") from error
        if response.is_success:
            return answer
        said = f"answered {response.status_code} {response.reason_phrase}: {_shown(answer)}"
        if response.status_code in RETRIED or response.is_server_error:
            raise _UnavailableError(said)
        self._fail(said, "correct the server, or the URL in rewards")

    def _read(self, answer: bytes, count: int) -> list[float]:
        """The rewards in an answer to `count` completions."""
        write = f'answer {{"rewards": [...]}} with {count} finite numbers, 0 for a completion that it cannot judge'
        try:
            rewards = json.loads(answer)
        except (ValueError, RecursionError):
            self._fail(f"answered what is not JSON: {_shown(answer)}", write)
        if isinstance(rewards, dict):
            rewards = rewards.get("rewards")
        if not isinstance(rewards, list):
            self._fail(f"answered JSON that is neither a list nor has one as `rewards`: {_shown(answer)}", write)
        if len(rewards) != count:
            self._fail(f"answered {len(rewards)} rewards for {count} completions", write)
        for index, value in enumerate(rewards):
            if not _is_finite(value):
                shown = _shown(json.dumps(value).encode())
                self._fail(f"answered {shown} for completion {index + 1} of {count}, no finite number", write)
        return [float(value) for value in rewards]

    def _fail(self, what: str, write: str) -> NoReturn:
        raise RewardError(
            f"reward server {self.url} {what}: {write}; then start again, or go on from the last checkpoint with "
            "`qerl train --resume RUN`"
        )


def _read_until(response: httpx.Response, deadline: float) -> bytes:
    """The body of the response. httpx limits the time of each read only, so a slow trickle could go on for ever."""
    parts = []
    for part in response.iter_bytes():
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _is_finite(value: object) -> bool:
    try:
        return type(value) in (int, float, bool) and math.isfinite(value)
    except OverflowError:  # JSON allows integers of any length
        return False


def _shown(answer: bytes) -> str:
    text = " ".join(answer[:SHOWN].decode("utf-8", "replace").split()) or "nothing"
    return text if len(answer) <= SHOWN else f"{text}..."
