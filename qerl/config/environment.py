"""The section `environment` of a recipe, with its rules. qerl/episodes says what an environment is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from qerl.config.data import no_secrets
from qerl.config.names import ENVIRONMENTS
from qerl.config.section import Conflict, Conflicts, Section, check_name

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
    timeout_s: float = Field(60.0, gt=0, description="seconds that one reset or step may take; then its episode ends")
    processes: int = Field(1, ge=1, description="processes in which environments of your own run, a share in each")


OWN = "path/to/file.py:Name, package.module:Name or an http://... URL"


def environment(config: RunConfig) -> Conflicts:
    """An environment or a tool is named in a form that can be found, and a reward of it has one."""
    this = config.environment
    if this is None:
        rewards = {"rewards": config.rewards}
        rewards |= {f"data.sources.{i}.rewards": source.rewards for i, source in enumerate(config.data.sources)}
        for key, listed in rewards.items():
            for i, reward in enumerate(listed):
                if reward.name == "environment":
                    yield Conflict(
                        {f"{key}.{i}.name": "environment", "environment": None},
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
        yield from check_name("environment.name", "environment", this.name, sorted(ENVIRONMENTS), OWN)
        if "://" in this.name:  # a class of the user's own may have such arguments
            yield from no_secrets("environment.args", this.args)
    for i, tool in enumerate(this.tools):
        yield from check_name(f"environment.tools.{i}", "tool", tool, sorted(ENVIRONMENTS), OWN)
