"""Sample episodes: an engine, environments, and where each episode begins."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl.base.isolate import at_end
from qerl.base.own_function import ENVIRONMENTS, EPISODE_COLUMNS
from qerl.checkpoint.load import end_token_ids
from qerl.config.data import is_url
from qerl.episodes.build import Source
from qerl.episodes.driven import Episode, Limits, Message, Start
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

    def start(self, example: Example, messages: tuple[Message, ...], ids: Sequence[int], seed: int) -> Start:
        """How an episode about a row begins, which environments see as its columns."""
        row = {**example.extra, "question": example.question, "answer": example.answer, "id": example.id}
        return Start(row, messages, ids, seed)

    def play(
        self, engine: Engine, starts: Sequence[Start], sampling: SamplingParams, seed: int, told: Finished | None = None
    ) -> list[Episode]:
        """The episodes, in the order of their starts. `told` is called with each of the model's turns as it ends."""
        episodes = Episodes(self.runner, self.chat, self.limits, sampling, starts, told)
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

    def close(self) -> None:
        """End the processes of the user's environments."""
        self.runner.close()


def open_environments(
    config: EnvironmentConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    max_tokens: int,
    context: int,
    switches: Mapping[str, Any] | None = None,
) -> Environments:
    """The environments of a recipe, for the model in `folder`. `max_tokens` is for a completion, `context` with its
    prompt; `switches` are variables of the chat template. They close where the run or evaluation ends
    (`qerl.base.isolate.closed_at_end`).

    Raises ConfigError for an environment that cannot be used, and CheckpointError for a template without its tools.
    """
    from transformers import AutoConfig

    if config.name is not None and is_url(config.name):
        check_reachable(config.name)
    runner = Runner(Source(config.name, tuple(config.tools), dict(config.args)), config.processes)
    try:
        end_ids = end_token_ids(folder, AutoConfig.from_pretrained(folder).get_text_config(), tokenizer)
        chat = Chat(tokenizer, runner.schemas, end_ids, switches)
    except BaseException:
        runner.close()
        raise
    limits = Limits(config.max_turns, max_tokens, context, config.timeout_s)
    at_end(runner.close)
    return Environments(runner, chat, limits)
