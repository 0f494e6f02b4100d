"""What one card of several takes of a run: its share of the prompts of a step, and of a validation. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.base.errors import ConfigError
from qerl.plan.advice import with_values

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


def check_ranks(config: RunConfig, size: int) -> None:
    """Raise ConfigError for a run that cannot be shared by so many processes."""
    if config.sft is not None:
        if config.sft.rows_per_step < size:
            raise ConfigError(
                f"sft.rows_per_step: {config.sft.rows_per_step} gives {size} processes less than a row each: write "
                f"{size} or more, or start fewer"
            )
        return
    if config.rollout.prompts_per_step < size:
        raise ConfigError(
            f"rollout.prompts_per_step: {config.rollout.prompts_per_step} gives {size} processes less than a group "
            f"each: write {size} or more, or start fewer"
        )
    if size > 1 and config.qat is not None and config.qat.forward == "masters":
        raise ConfigError(
            "qat.forward: masters multiplies by weights of which each process has a part: write --gpus 1, or "
            "qat.forward: packed"
        )
    if config.environment is not None and size > 1:
        raise ConfigError("environments are played by one process: write --gpus 1, or leave torchrun out")


def share_of(config: RunConfig, gpus: int) -> RunConfig:
    """The run as the card with the most work sees it. Raises ConfigError if it cannot be shared by so many.

    Training is dealt by cost, which is nearly that of this share. The sum of the gradient is left out.
    """
    check_ranks(config, gpus)
    limit = config.validation.limit
    values = {"rollout.prompts_per_step": -(-config.rollout.prompts_per_step // gpus)}
    if limit is not None:
        values["validation.limit"] = -(-limit // gpus)
    return with_values(config, values) if gpus > 1 else config
