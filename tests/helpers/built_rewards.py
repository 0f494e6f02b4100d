"""The rewards of a run with one source."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.config.data import RewardConfig
from qerl.data.tasks import Example
from training.rewards.rewards import Rewards, RewardsOf, build_all_rewards


def build_rewards(
    wanted: Sequence[RewardConfig],
    fixed: Mapping[str, Any],
    examples: Sequence[Example],
    run_dir: Path,
    episodes: Sequence[str] = (),
) -> Rewards:
    return build_all_rewards([RewardsOf("", wanted, fixed, examples)], run_dir, episodes)
