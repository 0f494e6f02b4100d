"""The section `environment` of a recipe, with its rules. qerl/episodes says what an environment is."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from qerl.base.http import url_mistake, url_shown
from qerl.config.conflict import Conflict, Conflicts
from qerl.config.names import ENVIRONMENTS
from qerl.config.rewards import check_headers_of
from qerl.config.section import Section

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


class EnvironmentConfig(Section):
    """What the model talks to in episodes of several turns. rollout.max_new_tokens is then for a whole episode."""

    name: str | None = Field(
        None,
        min_length=1,
        description="calculator, word_game, path of a class (`file.py:Name`, `package.module:Name`), or URL; null: "
        "only the tools",
    )
    tools: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="plain functions that the model may call, each by its path (`file.py:f`, `package.module:f`)"
    )
    args: dict[str, object] = Field(default_factory=dict, description="keyword arguments that make the environment")
    max_turns: int = Field(8, ge=1, description="turns of the model in an episode")
    max_observation_tokens: int | None = Field(
        None, ge=1, description="a longer message of the environment is cut to its beginning; null: no limit"
    )
    timeout_s: float = Field(60.0, gt=0, description="seconds that one reset or step may take; then its episode ends")
    processes: int = Field(1, ge=1, description="processes in which environments of your own run, a share in each")


OWN = "path/to/file.py:Name, package.module:Name or an http://... URL"


def environment(config: RunConfig) -> Conflicts:
    """An environment or a tool is named in a form that can be found, and a reward of it has one."""
    this = config.environment
    if this is None:
        for key, name in _rewards(config):
            if name == "environment":
                yield Conflict(
                    {key: "environment", "environment": None},
                    "there is no environment that could give a reward",
                    "environment: {name: word_game}, or your own",
                )
        return
    if this.name is None and not this.tools:
        yield Conflict(
            {"environment.name": None, "environment.tools": []},
            "nothing would answer the model",
            f"environment.name: calculator, word_game, {OWN}; or environment.tools: [file.py:function]",
        )
    if this.name is not None:
        yield from _name("environment.name", this.name)
        if "://" in this.name:  # a class of the user's own may have such an argument
            yield from check_headers_of("environment", this.args)
    for i, tool in enumerate(this.tools):
        yield from _name(f"environment.tools.{i}", tool, "tool")


def _rewards(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Key and name of each reward, the sources' rewards included."""
    for i, reward in enumerate(config.rewards):
        yield f"rewards.{i}.name", reward.name
    for i, source in enumerate(config.data.sources):
        for j, reward in enumerate(source.rewards):
            yield f"data.sources.{i}.rewards.{j}.name", reward.name


def _name(key: str, name: str, kind: str = "environment") -> Conflicts:
    if "://" in name and (mistake := url_mistake(name)):
        yield Conflict({key: url_shown(name)}, mistake, "a URL such as http://localhost:8000")
        return
    if name in ENVIRONMENTS or name.startswith(("http://", "https://")):
        return
    if name.endswith(".py"):
        yield Conflict({key: name}, "it is a file", f"the name in it too, {name}:NAME")
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if place and attribute.isidentifier():
        return
    known = sorted(ENVIRONMENTS)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    write = f"{key}: {near[0]} (or {OWN})" if near else f"one of {', '.join(known)}, or your own: {OWN}"
    yield Conflict({key: name}, f"there is no such {kind}", write)
