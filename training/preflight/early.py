"""Check a run by its configuration and files, before anything heavy is imported. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint.resolve import resolve_base_of_run
from qerl.data.examples import check_source
from qerl.tasks import get_task
from training.rewards.rewards import check_rewards
from training.run_dir.prolong import newest_step, with_steps

if TYPE_CHECKING:
    from qerl.config.schema import RunConfig


def check_config(config: RunConfig) -> None:
    """Raise ConfigError for a reward that cannot be used, or DataError or ConfigError for such a source of rows."""
    check_rewards(config)
    data = config.data
    check_source(get_task(data.task), data.source, data.split, data.columns)


def check_resumed(run_dir: Path, step: int | None = None, steps: int | None = None) -> None:
    """Raise QerlError if a run cannot continue from `step` (None: its last one) to `steps` (None: its present total).

    Unless the run is finished, the base and data it was started with have to be there.
    """
    done = newest_step(run_dir) if step is None else step
    config = with_steps(run_dir, steps, done)
    if done >= config.run.steps:
        return
    check_config(config)
    resolve_base_of_run(config.model.base, config.model.format, run_dir)
