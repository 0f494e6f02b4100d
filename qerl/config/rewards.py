"""The rules of `qerl/config/rules.py` about rewards: their names, weights and arguments.

REWARD_NAMES are the names that training/rewards/rewards.py registers. They are repeated here so that a misspelt one is
noticed before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.base.http import VARIABLE, is_secret
from qerl.config.section import Conflict, Conflicts, check_name

if TYPE_CHECKING:
    from qerl.config.data import RewardConfig
    from qerl.config.schema import RunConfig


REWARD_NAMES = ("accuracy", "format", "soft_overlong", "length", "judge", "environment")
GRADED = ("accuracy", "length")  # by the task's grading, or the user's own
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
    """Some reward has a weight, and none is listed twice."""
    yield from check_rewards(config, "rewards", config.rewards)


def check_rewards(config: RunConfig, key: str, listed: Sequence[RewardConfig]) -> Conflicts:
    """The same for the rewards that stand under `key`."""
    for i, reward in enumerate(listed):
        own = f"{key}.{i}.name"
        yield from check_name(own, "reward", reward.name, REWARD_NAMES, OWN)
        if any(reward.name == earlier.name for earlier in listed[:i]):
            yield Conflict({own: reward.name}, "this reward stands twice", "it once, with the weights added")
    if listed and config.distill is None and all(reward.weight == 0 for reward in listed):
        yield Conflict(
            {f"{key}.0.weight": 0.0}, "no reward has a weight, so nothing would be learned", f"{key}.0.weight: 1"
        )
    for i, reward in enumerate(listed):
        yield from _limits(config, f"{key}.{i}", reward)


def _limits(config: RunConfig, own: str, reward: RewardConfig) -> Conflicts:
    """Only what the user wrote has a time limit here."""
    graded = reward.name in GRADED and (config.data.grader or any(each.grader for each in config.data.sources))
    if reward.timeout_s is not None and not graded and (is_url(reward.name) or reward.name in REWARD_NAMES):
        asks = is_url(reward.name) or reward.name == "judge"
        why = "a server has its limit among its args" if asks else "it ends by itself"
        write = f"{own}.args.timeout_s" if asks else "it for your own functions only"
        yield Conflict({f"{own}.timeout_s": reward.timeout_s, f"{own}.name": reward.name}, why, write)
