"""What is trained: an adapter on a frozen base. Adapters that are packed in, and whole weights, stand in `weights.py`.

A run asks its policy for the parameters that the optimizer updates, for what a sync sends to the engine, for its files
in a checkpoint, and for the policy that a KL term compares with. Nothing else needs to know which kind it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from qerl.base.errors import ConfigError
from qerl.checkpoint.adapter import (
    adapter_scaling,
    adapter_tensors,
    attach_lora,
    load_tensors_,
    name_base_,
    reference_adapter,
    save_adapter,
    set_dtype_,
    start_at_,
)
from qerl.checkpoint.adapter_file import attach_to_experts_, linear_targets, read_adapter
from qerl.checkpoint.base_start import read_start
from qerl.config.names import adapts_experts, expert_rank
from qerl.engine.update import AdapterUpdate, Update
from qerl.plan.trained import ADAPTER_WORK

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import AdapterConfig
    from qerl.engine.interface import Engine
    from training.policy.weights import WeightsPolicy

Policy: TypeAlias = "AdapterPolicy | WeightsPolicy"

logger = logging.getLogger(__name__)


class AdapterPolicy:
    """A LoRA adapter, and perhaps norms, on a frozen base."""

    trained_bytes = ADAPTER_WORK  # per trained parameter, beside it: gradient, optimizer state, copies
    shards = None  # of several ranks that share the parameters out

    def __init__(self, model: PeftModel) -> None:
        self.model = model  # what the trainer is given: its parameters that require a gradient are trained
        self.base_model: PreTrainedModel = model.get_base_model()  # over the engine's weights

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trained parameters; of a policy that ranks share out, this rank's."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    replicas = parameters  # those that every rank has and updates by the same gradient

    def update(self) -> Update:
        """What a sync sends: the parameters as they are now, not copied."""
        return AdapterUpdate(adapter_tensors(self.model), adapter_scaling(self.model))

    def save(self, folder: Path) -> None:
        """Write the parameters into an existing folder."""
        save_adapter(self.model, folder)

    def load(self, folder: Path) -> int:
        """Copy saved parameters into those in training; returns the number of tensors. Raises QerlError if they do not
        fit."""
        tensors, scaling = read_adapter(folder)
        count = load_tensors_(self.model, tensors)
        if not math.isclose(scaling, own := adapter_scaling(self.model)):
            raise ConfigError(
                f"{folder} was trained with alpha / rank {scaling:g} and would act with {own:g}: write the "
                "adapter.alpha that was there in the run's config.yaml, or start a new run with this one as --model"
            )
        return count

    def reference(self) -> AbstractContextManager[None] | None:
        """Within it the model is the policy that the run began with; None if that was not kept."""
        return reference_adapter(self.model)


def check_reference(policy: Policy, kl_coef: float) -> None:
    """Raise ConfigError for a KL term without a policy to compare with."""
    if kl_coef and policy.reference() is None:
        raise ConfigError(
            f"loss.kl_coef: {kl_coef:g} compares with the policy that the run starts with, which a run that trains "
            "whole weights does not keep: write loss.kl_coef: 0"
        )


def build_policy(engine: Engine, base: ModelRef, adapter: AdapterConfig, seed: int) -> AdapterPolicy:
    """Attach the recipe's adapter to the engine's own modules: the base weights exist once.

    Where the recipe says so it starts at the start of the base; a frozen start is in the modules already.
    The adapter's master weights are float32, since a bfloat16 A of size 0.02 swallows an AdamW step of 1e-5; on a GPU
    its products run in bfloat16. Its A is drawn from `seed`.
    """
    base_model = engine.policy_model()
    targets = linear_targets(base_model, adapter.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = attach_lora(base_model, adapter.rank, adapter.alpha, targets, adapter.dropout, adapter.train_norms)
        if adapts_experts(adapter):
            attach_to_experts_(model, adapter.experts, expert_rank(adapter), adapter.alpha / adapter.rank)
    set_dtype_(model, torch.float32)
    name_base_(model, base.base)  # model.base of the recipe may be a run or an adapter
    policy = AdapterPolicy(model)
    trained = sum(parameter.numel() for parameter in policy.parameters())
    logger.info("adapter: rank %d, %.2f M parameters in float32", adapter.rank, trained / 1e6)
    if adapter.start == "trained" and base.start is not None and base.adapter is None:
        start_at_(policy.model, read_start(base.start))
    if base.adapter is not None:
        logger.info("starting from the adapter %s (%d tensors)", base.adapter, policy.load(base.adapter))
    return policy
