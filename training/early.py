"""What is refused of a run from its files and its configuration, before anything heavy is imported. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qerl.checkpoint import resolve_base_of_run
from qerl.data import check_source
from qerl.recipe import load_config
from qerl.tasks import get_task
from training.checkpoint import checkpoint_step, checkpoints
from training.rewards import check_rewards

if TYPE_CHECKING:
    from qerl.config import RunConfig


def check_config(config: RunConfig) -> None:
    """Raise ConfigError for a reward, DataError or ConfigError for a source of rows, that cannot be used."""
    check_rewards(config)
    data = config.data
    check_source(get_task(data.task), data.source, data.split, data.columns)


def check_resumed(run_dir: Path) -> None:
    """Raise QerlError if what an unfinished run was started with is no longer there."""
    config = load_config(run_dir / "config.yaml")
    if any(checkpoint_step(path) >= config.run.steps for path in checkpoints(run_dir)):
        return
    check_config(config)
    resolve_base_of_run(config.model.base, config.model.format, run_dir)
