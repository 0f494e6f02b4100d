"""The policy: the engine's base model, frozen, with a trainable LoRA adapter on it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from qerl.checkpoint.adapter import attach_lora, name_base_, set_dtype_
from training.policy.policy import AdapterPolicy

if TYPE_CHECKING:
    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import AdapterConfig
    from qerl.engine.interface import Engine

logger = logging.getLogger(__name__)


def build_policy(engine: Engine, base: ModelRef, adapter: AdapterConfig, seed: int) -> AdapterPolicy:
    """Attach the recipe's adapter to the engine's own modules: the base weights exist once.

    The adapter's master weights are in `adapter.dtype` (float32 by default: a bfloat16 A of size 0.02 swallows an
    AdamW step of 1e-5); on a GPU its products run in bfloat16. Its A is drawn from `seed`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = attach_lora(
            engine.policy_model(),
            adapter.rank,
            adapter.alpha,
            adapter.targets,
            adapter.dropout,
            adapter.train_norms,
        )
    set_dtype_(model, getattr(torch, adapter.dtype))
    name_base_(model, base.base)  # model.base of the recipe may be a run or an adapter
    policy = AdapterPolicy(model)
    trained = sum(parameter.numel() for parameter in policy.parameters())
    logger.info("adapter: rank %d, %.2f M parameters in %s", adapter.rank, trained / 1e6, adapter.dtype)
    if base.adapter is not None:
        logger.info("starting from the adapter %s (%d tensors)", base.adapter, policy.load(base.adapter))
    return policy
