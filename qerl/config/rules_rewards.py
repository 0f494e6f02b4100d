"""The rules of `qerl/config/rules.py` about rewards: their names, weights and arguments.

REWARD_NAMES are the names that training/rewards/rewards.py registers. They are repeated here so that a misspelt one is
noticed before anything heavy is imported.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from qerl.config.conflict import Conflict, Conflicts

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig

REWARD_NAMES = ("accuracy", "format", "soft_overlong", "length")
UNAVAILABLE = ("code",)  # find_reward says why
OWN = "your own: path/to/file.py:function, package.module:function or the http://... URL of a reward server"


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
        return f"{parts.scheme or 'no scheme'}:// is spoken by no reward server"
    if not parts.hostname or any(letter.isspace() for letter in url):
        return "it names no host" if not parts.hostname else "it holds a blank"
    if parts.username is not None:
        return "a name and password in it would be logged"
    return None


def rewards(config: RunConfig) -> Conflicts:
    """Some reward has a weight, none is listed twice, and the soft punishment leaves room to answer."""
    names = [reward.name for reward in config.rewards]
    for i, name in enumerate(names):
        yield from _name(i, name)
        if name in names[:i]:
            yield Conflict({f"rewards.{i}.name": name}, "this reward stands twice", "it once, with the weights added")
    if all(reward.weight == 0 for reward in config.rewards):
        yield Conflict(
            {"rewards.0.weight": 0.0}, "no reward has a weight, so nothing would be learned", "rewards.0.weight: 1"
        )
    longest = config.rollout.max_new_tokens
    for i, reward in enumerate(config.rewards):
        cache = reward.args.get("cache")
        own_limit = reward.args.get("max_length") is not None  # the reward itself refuses a cache above that
        if reward.name == "soft_overlong" and not own_limit and isinstance(cache, int) and cache >= longest:
            yield Conflict(
                {f"rewards.{i}.args.cache": cache, "rollout.max_new_tokens": longest},
                "the punishment would begin before the first token",
                f"a cache below {longest}, such as {longest // 4}",
            )


def _name(i: int, name: str) -> Conflicts:
    """The name is registered, or has the form of a function's path or of a URL (which are not tried)."""
    if name in REWARD_NAMES or name in UNAVAILABLE:
        return
    key = {f"rewards.{i}.name": name}
    if is_url(name):
        mistake = url_mistake(name)
        if mistake:
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
    write = f"rewards.{i}.name: {near[0]} (rewards: {known}; {OWN})" if near else f"one of {known} ({OWN})"
    yield Conflict(key, "there is no such reward", write)
