"""The rules of `qerl/config/rules.py` about rewards: their names, weights and arguments.

REWARD_NAMES are the names that training/rewards/rewards.py registers. They are repeated here so that a misspelt one is
noticed before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from qerl.config.conflict import Conflict, Conflicts

if TYPE_CHECKING:
    from qerl.config.data import RewardConfig
    from qerl.config.schema import RunConfig


REWARD_NAMES = ("accuracy", "format", "soft_overlong", "length", "judge", "environment")
UNAVAILABLE = ("code",)  # find_reward says why
OWN = "your own: path/to/file.py:function, package.module:function or the http://... URL of a reward server"

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")  # a variable of the environment in a header
SHORTEST_KEY = 8  # characters; `?key=1` in a URL is no secret
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS = ("accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host", "te")
_OURS += ("trailer", "transfer-encoding", "upgrade")
_SECRET = re.compile(r"auth|cookie|credential|key|password|passwd|secret|session|signature|token", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\s*(bearer|basic|digest|token)\s|\s*(sk|hf|ghp|xox[abp])[-_]", re.IGNORECASE)


_SECRET_IN_TEXT = re.compile(
    rf"({_SECRET.pattern})[\w-]*[\"']?\s*[:=]\s*[\"']?(?!-?\d+\b)[^\s\"',}}\]]{{{SHORTEST_KEY}}}|\b(sk|hf|ghp|xox[abp])[-_]\w",
    re.IGNORECASE,
)


def may_hold_key(text: str) -> bool:
    """Whether a line of a recipe may hold a key, so that no error repeats it."""
    return _SECRET_IN_TEXT.search(text) is not None


def is_url(name: str) -> bool:
    """Whether the name means a reward server."""
    return "://" in name


def url_mistake(url: str) -> str | None:
    """Why `url` cannot be that of a reward server, in words; None if it can."""
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
    if any(_SECRET.search(key) and len(value) >= SHORTEST_KEY for key, value in parse_qsl(parts.query)):
        return "a key in it would be logged, and written into the run (args.headers takes one as ${NAME})"
    return None


def url_shown(url: str) -> str:
    """A URL as errors show it: without a name and password, and without the values in its query."""
    place, question, query = url.partition("?")
    scheme, slashes, rest = place.rpartition("://")
    authority, slash, path = rest.partition("/")
    query = re.sub(r"=[^&]*", "=...", query)
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
    return place if _is_secret(value, name) else None


def _is_secret(value: object, name: str) -> bool:
    """Whether a text is a key, by its name or by how it begins. Numbers are none: max_tokens has a name like one."""
    if not isinstance(value, str):
        return False
    return bool(_SECRET_VALUE.match(value) or (_SECRET.search(name) and len(value) >= SHORTEST_KEY))


def without_secrets(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as plain values, with "(not shown)" for what may be a key in arguments of rewards or environment."""
    sources = [{**each, "rewards": _without(each["rewards"])} for each in recipe["data"]["sources"]]
    hidden = {"data": {**recipe["data"], "sources": sources}, "rewards": _without(recipe["rewards"])}
    if recipe.get("environment"):
        hidden["environment"] = {**recipe["environment"], "args": _hidden(recipe["environment"]["args"])}
    return {**recipe, **hidden}


def _without(rewards: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "args": _hidden(each["args"])} for each in rewards]


def _hidden(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(each, name) for each in value]
    secret = isinstance(value, str) and (_SECRET.search(name) or _SECRET_VALUE.match(value))
    return "(not shown)" if secret and not VARIABLE.search(value) else value


def rewards(config: RunConfig) -> Conflicts:
    """Some reward has a weight, none is listed twice, and the soft punishment leaves room to answer."""
    yield from check_rewards(config, "rewards", config.rewards)


def check_rewards(config: RunConfig, key: str, listed: Sequence[RewardConfig]) -> Conflicts:
    """The same for the rewards that stand under `key`."""
    for i, reward in enumerate(listed):
        own = f"{key}.{i}"
        yield from _name(own, reward.name)
        if is_url(reward.name) or reward.name == "judge":  # a function of the user's own may have such an argument
            yield from check_headers_of(own, reward.args)
        url = reward.args.get("url") if reward.name == "judge" else None
        if isinstance(url, str) and (mistake := url_mistake(url)):
            shown = {f"{own}.args.url": url_shown(url)}
            yield Conflict(shown, mistake, "the judge's URL up to /v1, such as http://localhost:8001/v1")
        body = reward.args.get("body") if reward.name == "judge" else None
        if (place := secret_place(body, f"{own}.args.body")) is not None:
            yield Conflict(
                {place: "(not shown)"},
                "a key there would be written into the run and its report",
                'args.headers: {Authorization: "Bearer ${NAME}"}, and put the key into that variable',
            )
        if any(reward.name == earlier.name for earlier in listed[:i]):
            yield Conflict({f"{own}.name": reward.name}, "this reward stands twice", "it once, with the weights added")
    if listed and config.distill is None and all(reward.weight == 0 for reward in listed):
        yield Conflict(
            {f"{key}.0.weight": 0.0}, "no reward has a weight, so nothing would be learned", f"{key}.0.weight: 1"
        )
    for i, reward in enumerate(listed):
        yield from _limits(config, f"{key}.{i}", reward)


def _limits(config: RunConfig, own: str, reward: RewardConfig) -> Conflicts:
    """Only a function of the user's own has a time limit here, and the soft punishment leaves room to answer."""
    if reward.timeout_s is not None and (is_url(reward.name) or reward.name in REWARD_NAMES):
        asks = is_url(reward.name) or reward.name == "judge"
        why = "a server has its limit among its args" if asks else "it ends by itself"
        write = f"{own}.args.timeout_s" if asks else "it for your own functions only"
        yield Conflict({f"{own}.timeout_s": reward.timeout_s, f"{own}.name": reward.name}, why, write)
    longest, cache = config.rollout.max_new_tokens, reward.args.get("cache")
    own_limit = reward.args.get("max_length") is not None  # the reward itself refuses a cache above that
    if reward.name == "soft_overlong" and not own_limit and isinstance(cache, int) and cache >= longest:
        yield Conflict(
            {f"{own}.args.cache": cache, "rollout.max_new_tokens": longest},
            "the punishment would begin before the first token",
            f"a cache below {longest}, such as {longest // 4}",
        )


def check_headers_of(own: str, args: Mapping[str, object]) -> Conflicts:
    """Each header can be sent and holds no key. Its value is left out of the error."""
    headers = args.get("headers")
    for name, value in headers.items() if isinstance(headers, dict) else ():
        if mistake := header_mistake(name, value):
            why, write = mistake
            yield Conflict({f"{own}.args.headers.{name}": "(not shown)"}, why, write)


def _name(own: str, name: str) -> Conflicts:
    """The name is registered, or has the form of a function's path or of a URL (which are not tried)."""
    if name in REWARD_NAMES or name in UNAVAILABLE:
        return
    key = {f"{own}.name": name}
    if is_url(name):
        mistake = url_mistake(name)
        if mistake:
            key = {f"{own}.name": url_shown(name)}
            yield Conflict(key, mistake, "a URL such as http://localhost:8000/grade")
        return
    if name.endswith(".py"):
        yield Conflict(key, "it is a file", f"the function in it too, {name}:FUNCTION")
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if place and attribute.isidentifier():
        return
    if place and (attribute[:1].isdigit() or "/" in attribute):
        yield Conflict(key, "it names no function", f"http://{name} if a reward server is meant; {OWN}")
        return
    near = difflib.get_close_matches(name.lower(), REWARD_NAMES, n=1)
    known = ", ".join(REWARD_NAMES)
    write = f"{own}.name: {near[0]} (rewards: {known}; {OWN})" if near else f"one of {known} ({OWN})"
    yield Conflict(key, "there is no such reward", write)
