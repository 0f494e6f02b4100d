"""The parts of a trainer, as `training.run` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from qerl.config.schema import RunConfig
    from qerl.plan.micro_batch_plan import MicroBatchPlan
    from training.rewards.rewards import Rewards
    from training.rollout.prompts import Prompts
    from training.rollout.rollout import Rollout
    from training.run_dir.log import RunLog


@dataclass(frozen=True)
class TrainerParts:
    """What a trainer is built from."""

    config: RunConfig
    policy: PeftModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    rewards: Rewards
    rollout: Rollout
    plan: MicroBatchPlan
    run_dir: Path
    run_log: RunLog
