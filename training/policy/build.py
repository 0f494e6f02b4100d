"""The policy: the engine's base model, frozen, with a trainable LoRA adapter on it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from qerl.checkpoint.adapter import attach_lora, set_dtype_

if TYPE_CHECKING:
    from peft import PeftModel

    from qerl.config.schema import RunConfig
    from qerl.engine.interface import Engine

logger = logging.getLogger(__name__)


def build_policy(engine: Engine, config: RunConfig) -> PeftModel:
    """Attach the recipe's adapter to the engine's own modules: the base weights exist once.

    The adapter's master weights are in `adapter.dtype` (float32 by default: a bfloat16 A of size 0.02 swallows an
    AdamW step of 1e-5); on a GPU its products run in bfloat16. Its A is drawn from `run.seed`.
    """
    adapter = config.adapter
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        policy = attach_lora(
            engine.policy_model(),
            adapter.rank,
            adapter.alpha,
            adapter.targets,
            adapter.dropout,
            adapter.train_norms,
        )
    set_dtype_(policy, getattr(torch, adapter.dtype))
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    logger.info("adapter: rank %d, %.2f M parameters in %s", adapter.rank, trained / 1e6, adapter.dtype)
    return policy
