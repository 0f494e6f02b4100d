"""The sources of a recipe's rows: one, or several with weights, each with its rewards. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl.base.errors import ConfigError, DataError

if TYPE_CHECKING:
    from qerl.config.data import DataConfig, RewardConfig, SourceConfig, SourceValidationConfig
    from qerl.config.schema import RunConfig

AS_DATA = (  # keys of a source that are those of `data` where it leaves them null
    *("task", "split", "columns", "system_prompt", "prompt_template", "grader"),
)


@dataclass(frozen=True)
class Source:
    """One source as if it were the only one: `data` has no sources. The only source of a recipe has no name."""

    name: str
    weight: float
    data: DataConfig
    rewards: Sequence[RewardConfig]
    held_out: int = 0
    validation: SourceValidationConfig | None = None

    @property
    def validates(self) -> bool:
        """Whether validations ask rows of its own."""
        return self.validation is not None or self.held_out > 0


def sources_of(config: RunConfig) -> tuple[Source, ...]:
    """The sources of a recipe in their order; a recipe without `data.sources` is its own only one."""
    if not config.data.sources:
        return (Source("", 1.0, config.data, config.rewards),)
    return tuple(_settled(config, each) for each in config.data.sources)


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Within it, errors about rows name the source."""
    try:
        yield
    except (DataError, ConfigError) as error:
        if not source.name:
            raise
        raise type(error)(f"source {source.name}: {error}") from error


def _settled(config: RunConfig, this: SourceConfig) -> Source:
    own = {key: value for key in AS_DATA if (value := getattr(this, key)) is not None}
    if this.task not in (None, config.data.task) and this.grader is None:
        own["grader"] = None  # the grader of data is for the task of data
    data = config.data.model_copy(update={**own, "source": this.source, "limit": this.limit, "sources": ()})
    return Source(this.name, this.weight, data, this.rewards or config.rewards, this.held_out, this.validation)
