"""The rules of `qerl/config/rules.py` about rewards: their names, weights and arguments.

REWARD_NAMES are the names that training/rewards/rewards.py registers. They are repeated here so that a misspelt one is
noticed before anything heavy is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.base.http import VARIABLE, header_mistake, is_secret, secret_place, url_mistake, url_shown
from qerl.config.conflict import Conflict, Conflicts

if TYPE_CHECKING:
    from qerl.config.data import RewardConfig
    from qerl.config.schema import RunConfig


REWARD_NAMES = ("accuracy", "format", "soft_overlong", "length", "judge", "environment")
GRADED = ("accuracy", "length")  # by the task's grading, or the user's own
UNAVAILABLE = ("code",)  # find_reward says why
OWN = "your own: path/to/file.py:function, package.module:function or the http://... URL of a reward server"


def is_url(name: str) -> bool:
    """Whether the name means a reward server."""
    return "://" in name


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
    secret = isinstance(value, str) and is_secret(value, name, shortest=0)
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
    """Only what the user wrote has a time limit here, and the soft punishment leaves room to answer."""
    graded = reward.name in GRADED and (config.data.grader or any(each.grader for each in config.data.sources))
    if reward.timeout_s is not None and not graded and (is_url(reward.name) or reward.name in REWARD_NAMES):
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
