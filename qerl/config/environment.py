"""The section `environment` of a recipe. qerl/episodes says what an environment is."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qerl.config.section import Section


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
    max_turn_tokens: int | None = Field(
        None, ge=1, description="a turn of the model is truncated here, which ends its episode; null: no own limit"
    )
    max_observation_tokens: int | None = Field(
        None, ge=1, description="a longer message of the environment is cut to its beginning; null: no limit"
    )
    timeout_s: float = Field(60.0, gt=0, description="seconds that one reset or step may take; then its episode ends")
    failure_reward: float = Field(0.0, description="environment's reward of an episode in which it failed or was late")
    processes: int = Field(1, ge=1, description="processes in which environments of your own run, a share in each")
