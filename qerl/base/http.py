"""Questions to an HTTP server, each within one deadline and one limit on bytes, whatever the server does.

httpx limits the time of each read only, so a header that comes byte by byte, or 1xx responses without end, could last
for ever. Here the whole exchange is one task of an event loop, which is cancelled at its deadline. The loop runs in a
thread of its own, so that the caller may have a loop itself, and a name lookup that hangs is left behind.

In the headers of a recipe `${NAME}` stands for a variable of the environment. The recipe, and all that a run writes,
keep `${NAME}`; the value is put in when a request is sent, and taken out of whatever the server says that is shown.

Importing this does not load httpx: the rules of recipes ask what a key is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from qerl.base.errors import ConfigError

if TYPE_CHECKING:
    import ssl

    import httpx


VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")  # a variable of the environment in a header
SHORTEST_KEY = 8  # characters; `?key=1` in a URL is not a secret
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS = ("accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host", "te")
_OURS += ("trailer", "transfer-encoding", "upgrade")
_SECRET = re.compile(r"auth|cookie|credential|key|password|passwd|secret|session|signature|token", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\s*(bearer|basic|digest|token)\s|\s*(sk|hf|ghp|xox[abp])[-_]", re.IGNORECASE)
_KEY = re.compile(r"\b(?:sk|hf|ghp|xox[abp])[-_](?=[\w-]*\d)[\w-]{16,}", re.ASCII)  # a key by itself, as in a path
_SIGNED = re.compile(r"(?:^|[_-])(?:sig|code)$", re.IGNORECASE)  # parameters of a URL that clouds sign

_SECRET_IN_TEXT = re.compile(
    rf"({_SECRET.pattern})[\w-]*[\"']?\s*[:=]\s*[\"']?(?!-?\d+\b)[^\s\"',}}\]]{{{SHORTEST_KEY}}}|\b(sk|hf|ghp|xox[abp])[-_]\w",
    re.IGNORECASE,
)


def may_hold_key(text: str) -> bool:
    """Whether a line of a recipe may hold a key, so that no error repeats it."""
    return _SECRET_IN_TEXT.search(text) is not None


def url_mistake(url: str) -> str | None:
    """Why `url` cannot be a reward server's, in words; None if it can."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"it is no URL ({error})"
    if parts.scheme not in ("http", "https"):
        return f"{parts.scheme or 'no scheme'}:// is spoken by no reward server"  # nor by an environment
    if not parts.hostname or any(letter.isspace() for letter in url):
        return "it names no host" if not parts.hostname else "it holds a blank"
    if parts.username is not None:
        return "a name and password in it would be logged"
    given = [*parse_qsl(parts.query), *parse_qsl(parts.fragment)]
    secrets = [value for name, value in given if _SECRET.search(name) or _SIGNED.search(name)]
    if any(len(value) >= SHORTEST_KEY for value in secrets) or _KEY.search(url):
        return "a key in it would be logged, and written into the run (args.headers takes one as ${NAME})"
    return None


def url_shown(url: str) -> str:
    """A URL as errors show it: without a name and password, without keys, and without the values in its query."""
    place, question, query = re.fullmatch(r"([^?#]*)(.?)(.*)", _KEY.sub("...", url), re.DOTALL).groups()
    scheme, slashes, rest = place.rpartition("://")
    authority, slash, path = rest.partition("/")
    query = re.sub(r"=[^&#]*", "=...", query)
    return f"{scheme}{slashes}{authority.rpartition('@')[2]}{slash}{path}{question}{query}"


def header_mistake(name: object, value: object) -> tuple[str, str] | None:
    """Why a header cannot be sent, and what to write instead; None if it can. The value is never repeated."""
    if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
        return "this is no name of a header", "a name such as Authorization or X-Api-Key"
    if name.lower() in _OURS:
        return "qerl sets this header itself", "the other headers only"
    if not isinstance(value, str):
        return "its value is no text", "text in quotes, with ${NAME} for a variable of the environment"
    plain = VARIABLE.sub("", value)
    if "$" in plain:
        return "a $ in it names no variable", "${NAME}, with letters, digits and _ in NAME"
    if not (plain.isascii() and plain.isprintable()):
        return "its value has a character that no header can hold", "plain ASCII text in one line"
    if plain == value and (_SECRET.search(name) or _SECRET_VALUE.match(value)):
        variable = re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_")
        return (
            "a key in the recipe would be written into the run and its report",
            f"${{{variable}}} in its place, and put the key into that variable of the environment",
        )
    return None


def secret_place(value: object, place: str, name: str = "") -> str | None:
    """Where in a value of the recipe, which stands at `place`, there is a key; None if there is none."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in parts:
        named = str(key) if isinstance(value, Mapping) else name
        if (found := secret_place(each, f"{place}.{key}", named)) is not None:
            return found
    return place if is_secret(value, name) else None


def is_secret(value: object, name: str, shortest: int = SHORTEST_KEY) -> bool:
    """Whether a text is a key, by its name or by how it begins. A number never is: max_tokens has a name like a key."""
    if not isinstance(value, str):
        return False
    return bool(_SECRET_VALUE.match(value) or (_SECRET.search(name) and len(value) >= shortest))


@dataclass(frozen=True)
class Headers:
    """The headers as the recipe has them."""

    given: Mapping[str, str] = field(default_factory=dict)

    def expanded(self) -> dict[str, str]:
        """The headers to send."""
        return {name: VARIABLE.sub(lambda found: os.environ[found[1]], value) for name, value in self.given.items()}

    def hidden(self, text: str) -> str:
        """`text` with each variable's value replaced by its name: a server may repeat the key that it refuses."""
        names = {name for value in self.given.values() for name in VARIABLE.findall(value)}
        values = {name: os.environ[name] for name in names if os.environ.get(name)}
        for name in sorted(values, key=lambda name: -len(values[name])):
            text = text.replace(values[name], f"${{{name}}}")
        return text


def check_headers(who: str, given: object) -> Headers:
    """The headers of `who`, such as "reward judge". Raises ConfigError, never with a value, if one cannot be sent."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{who}: args.headers is no mapping: write for example {{Authorization: "Bearer ${{GRADER_KEY}}"}}'
        )
    for name, value in given.items():
        if mistake := header_mistake(name, value):
            raise ConfigError(f"{who}: args.headers.{name}: {mistake[0]}; write {mistake[1]}")
        for variable in VARIABLE.findall(value):
            held = os.environ.get(variable)
            if not held:
                state = "is not set in" if held is None else "is empty in"
                raise ConfigError(
                    f"{who}: args.headers.{name} names ${{{variable}}}, which {state} the environment: "
                    f"`export {variable}=...`, then start again"
                )
            if not (held.isascii() and held.isprintable()):
                raise ConfigError(
                    f"{who}: args.headers.{name} names ${{{variable}}}, whose value has a line break or another "
                    f"character that no header can hold: `export {variable}=...` without it"
                )
    return Headers(dict(given))


RETRIED = (408, 429)  # request timeout, too many requests; every 5xx is retried too
LONGEST_PAUSE_S = 30.0
SHOWN = 80  # characters of an answer that an error shows
THREAD = "reward-server"
SENT = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
CORRECT = "correct the server, or its URL and headers in rewards"

logger = logging.getLogger(__name__)


class AskError(Exception):
    """No answer that can be used: `what` the server did, and what to `write` instead."""

    def __init__(self, what: str, write: str) -> None:
        super().__init__(what)
        self.what, self.write = what, write


@dataclass(frozen=True)
class Server:
    """Whom to ask, and how patiently."""

    who: str  # how messages name it
    url: str
    headers: Headers
    timeout_s: float  # of one exchange, from the connection to the last byte
    retries: int
    backoff_s: float
    largest: int  # bytes of an answer

    @property
    def proxies(self) -> bool:
        """Whether the proxies that the environment names are used: not for a server on this machine."""
        return urlsplit(self.url).hostname not in ("localhost", "127.0.0.1", "::1")


def ask(server: Server, bodies: Sequence[bytes], at_once: int = 1) -> list[bytes]:
    """The answers to JSON questions, up to `at_once` of them asked at the same time. Raises AskError for the first that
    has none in the end; the others are then given up."""
    return _in_own_loop(_ask_all(server, bodies, at_once))


def shown(answer: bytes | str, headers: Headers | None = None) -> str:
    """The beginning of an answer in one line, without control characters, and without the values in `headers`.

    These are hidden before the text is cut: half a key would no longer be recognized.
    """
    whole = answer if isinstance(answer, str) else answer.decode("utf-8", "replace")
    if headers is not None:
        whole = headers.hidden(whole)
    text = " ".join("".join(c if c.isprintable() else " " for c in whole[: 4 * SHOWN]).split()) or "nothing"
    return text if len(text) <= SHOWN and len(whole) <= 4 * SHOWN else f"{text[:SHOWN]}..."


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than most answers."""
    import httpx

    return httpx.create_ssl_context()


def _in_own_loop(work: Coroutine[Any, Any, list[bytes]]) -> list[bytes]:
    """The result of `work`, without waiting for what its event loop still closes."""
    done: Future[list[bytes]] = Future()

    async def main() -> None:
        try:
            done.set_result(await work)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=lambda: asyncio.run(main()), name=THREAD, daemon=True).start()
    return done.result()


async def _ask_all(server: Server, bodies: Sequence[bytes], at_once: int) -> list[bytes]:
    import httpx

    places, limits = asyncio.Semaphore(at_once), httpx.Limits(max_connections=at_once)
    headers = {**SENT, **server.headers.expanded()}
    options = {"trust_env": server.proxies, "timeout": None, "limits": limits, "verify": _certificates()}
    async with httpx.AsyncClient(headers=headers, **options) as client:

        async def one(body: bytes) -> bytes:
            async with places:
                return await _ask_again(client, server, body)

        tasks = [asyncio.ensure_future(one(body)) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def _ask_again(client: httpx.AsyncClient, server: Server, body: bytes) -> bytes:
    """The answer to one question, which is asked again as often as `server` says. httpx retries connections only."""
    import httpx

    for attempt in range(server.retries + 1):
        asked_s = None
        try:
            async with asyncio.timeout(server.timeout_s):
                response, answer = await _exchange(client, server, body)
        except TimeoutError:
            reason = f"did not answer within {server.timeout_s:g} s"
        except httpx.ConnectError as error:
            reason = f"cannot be reached ({_cause(error)})"
        except httpx.RequestError as error:  # the connection broke, or the answer is not HTTP
            reason = f"broke off ({error or type(error).__name__})"
        else:
            if response.is_success:
                return answer
            phrase, said = (shown(each, server.headers) for each in (response.reason_phrase, answer))
            reason = f"answered {response.status_code} {phrase}: {said}"
            if not (response.status_code in RETRIED or response.is_server_error):
                raise AskError(reason, CORRECT)
            asked_s = _retry_after_s(response.headers.get("Retry-After"))
        reason = server.headers.hidden(reason)
        if attempt < server.retries:
            pause = min(server.backoff_s * 2**attempt, LONGEST_PAUSE_S) if asked_s is None else asked_s
            if pause > (longest := max(server.timeout_s, LONGEST_PAUSE_S)):
                raise AskError(
                    f"{reason} and asks for a pause of {pause:g} s (Retry-After), longer than the {longest:g} s that "
                    "qerl waits",
                    f"raise args.timeout_s to {pause:g}, or ask it less often",
                )
            logger.warning("%s %s; asked again in %g s", server.who, reason, pause)
            await asyncio.sleep(pause)
    times = f"{server.retries + 1} times" if server.retries else "once"
    raise AskError(f"{reason} (asked {times})", "start it, correct its URL, or raise args.timeout_s or args.retries")


async def _exchange(client: httpx.AsyncClient, server: Server, body: bytes) -> tuple[httpx.Response, bytes]:
    """The response with its body. A compressed one is refused: it was not asked for, and httpx would unpack it whatever
    its size."""
    parts, size = [], 0
    async with client.stream("POST", server.url, content=body) as response:
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            what = f"answered in Content-Encoding {shown(encoding, server.headers)}, though asked for plain JSON"
            raise AskError(what, CORRECT)
        async for part in response.aiter_raw():
            size += len(part)
            if size > server.largest:
                raise AskError(f"answered more than {server.largest / 2**20:g} MiB, the most that qerl reads", CORRECT)
            parts.append(part)
            await asyncio.sleep(0)  # the deadline is looked at here, even if the next part has already come
    return response, b"".join(parts)


def _retry_after_s(value: str | None) -> float | None:
    """The seconds that a Retry-After header asks for, as a number or a date; None if it cannot be read."""
    if value is not None and value.strip().isdecimal():
        return float(value.strip()[:12])
    try:
        date = parsedate_to_datetime(value or "")
    except (ValueError, OverflowError):
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _cause(error: BaseException) -> str:
    """The first cause of a failed connection in words: httpx says only that all attempts failed."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif (inner := error.__cause__ or error.__context__) is None:
            break
        else:
            error = inner
    known = type(error) is not socket.gaierror and isinstance(error, OSError) and error.errno
    return os.strerror(error.errno).lower() if known else str(error)


def check_patience(who: str, args: Mapping[str, Any]) -> None:
    """Raise ConfigError for `args` of the recipe that no server can be asked with."""
    for key in ("timeout_s", "backoff_s"):
        value = args.get(key, 1)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ConfigError(f"{who}: args.{key} is {value!r}: write a number of seconds above 0")
    retries = args.get("retries", 0)
    if type(retries) is not int or retries < 0:
        raise ConfigError(f"{who}: args.retries is {retries!r}: write 0 or a whole number above")
