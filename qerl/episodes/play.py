"""Sample episodes: an engine, environments, and where each episode begins."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl.base.own_function import ENVIRONMENTS, EPISODE_COLUMNS
from qerl.config.data import is_url
from qerl.episodes.build import Source
from qerl.episodes.driven import Episode, Limits, Start
from qerl.episodes.endpoint import Chat
from qerl.episodes.episodes import Episodes
from qerl.episodes.remote import check_reachable
from qerl.episodes.runner import Runner

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from qerl.config.environment import EnvironmentConfig
    from qerl.data.tasks import Example
    from qerl.engine.interface import Engine, Finished, SamplingParams

logger = logging.getLogger(__name__)

_opened: list[Environments] = []


@dataclass(frozen=True)
class Environments:
    """What the episodes of a run or an evaluation are played with."""

    runner: Runner
    chat: Chat
    limits: Limits

    @property
    def columns(self) -> tuple[str, ...]:
        """The further columns that rewards of episodes get."""
        return (*EPISODE_COLUMNS, *([] if self.runner.source.own_code else [ENVIRONMENTS]))

    def close(self) -> None:
        """End the processes of the user's environments."""
        self.runner.close()


@contextmanager
def environments_ended() -> Iterator[None]:
    """At its end, whatever happened, the environments that were opened within it are closed."""
    before = len(_opened)
    try:
        yield
    finally:
        with ExitStack() as ending:  # one that cannot be closed leaves none of the others open
            for opened in _opened[before:]:
                ending.callback(opened.close)
            del _opened[before:]


def open_environments(
    config: EnvironmentConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    max_tokens: int,
    context: int,
    switches: Mapping[str, Any] | None = None,
) -> Environments:
    """The environments of a recipe, for the model in `folder`. `max_tokens` is for a completion, `context` with its
    prompt; `switches` are variables of the chat template. `environments_ended` closes them.

    Raises ConfigError for an environment that cannot be used, and CheckpointError for a template without its tools.
    """
    from transformers import AutoConfig

    from qerl.checkpoint.load import end_token_ids

    if config.name is not None and is_url(config.name):
        check_reachable(config.name)
    runner = Runner(Source(config.name, tuple(config.tools), dict(config.args)), config.processes)
    try:
        end_ids = end_token_ids(folder, AutoConfig.from_pretrained(folder).get_text_config(), tokenizer)
        chat = Chat(tokenizer, runner.schemas, end_ids, switches)
    except BaseException:
        runner.close()
        raise
    limits = Limits(config.max_turns, max_tokens, context, config.max_observation_tokens, config.timeout_s)
    _opened.append(Environments(runner, chat, limits))
    return _opened[-1]


def row_of(example: Example) -> dict[str, Any]:
    """The columns of a row as environments see them."""
    return {**example.extra, "question": example.question, "answer": example.answer, "id": example.id}


def play(
    engine: Engine,
    environments: Environments,
    starts: Sequence[Start],
    sampling: SamplingParams,
    seed: int,
    told: Finished | None = None,
) -> list[Episode]:
    """The episodes, in the order of their starts. `told` is called with each of the model's turns as it ends."""
    episodes = Episodes(environments.runner, environments.chat, environments.limits, sampling, starts, told)
    try:
        engine.run(episodes, seed)
    except BaseException:
        episodes.drop()
        raise
    finished = episodes.finish()
    if errors := [episode.error for episode in finished if episode.error is not None]:
        logger.warning(
            "%d of %d episodes were ended by their environment, the first of which %s",
            *(len(errors), len(finished), errors[0]),
        )
    return finished


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The metrics of a rollout's episodes: means over them, shares of them, and seconds of waiting."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(episodes)

    calls = sum(episode.tool_calls for episode in episodes)
    return {
        "environment/reward": mean([episode.reward for episode in episodes]),
        "environment/turns": mean([episode.model_turns for episode in episodes]),
        "environment/tokens": mean([episode.written.count(False) for episode in episodes]),
        "environment/tool_calls": calls / len(episodes),
        "environment/tool_errors_share": sum(episode.tool_errors for episode in episodes) / max(calls, 1),
        "environment/turn_limit_share": mean([episode.ended == "turns" for episode in episodes]),
        "environment/cut_observations": mean([episode.cut for episode in episodes]),
        "environment/failed_share": mean([episode.ended == "failed" for episode in episodes]),
        "time/environment_s": mean([episode.waited_s for episode in episodes]),
        "time/environment_longest_s": max(episode.waited_s for episode in episodes),
    }
