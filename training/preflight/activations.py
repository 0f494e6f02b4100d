"""What a run that rounds activations is told, or refused for, before an engine is opened. No torch on import."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from qerl import formats
from qerl.base.devices import FP8_CAPABILITY
from qerl.base.errors import ConfigError
from qerl.checkpoint.activations import GRPO_WARNING, kind_of_activations
from qerl.checkpoint.load import local_folder

if TYPE_CHECKING:
    from qerl.checkpoint.resolve import ModelRef
    from qerl.config.schema import RunConfig

logger = logging.getLogger(__name__)


def check_activations(config: RunConfig, base: ModelRef) -> None:
    """Warn that GRPO may not converge with 4-bit activations, by the recipe or of a frozen base. A distillation does.

    Raises ConfigError for dropout on an adapter's input: the engine's adapter reads what its linear reads; and for
    training in FP8 on a card without.
    """
    if config.train.fp8_recipe is not None:
        _check_card(config.train.fp8_recipe)
    if config.qat is not None:
        packed = formats.get(config.qat.quant_cfg.weights.format)
        kind = config.qat.quant_cfg.activations if packed.four_bit_inputs else "none"
    else:
        kind = kind_of_activations(local_folder(base.base, config.model.trust_remote_code), formats.get(base.format))
        if kind != "none" and config.adapter.dropout:
            raise ConfigError(
                f"adapter.dropout: {config.adapter.dropout:g} does not go with {base.base}, whose linears round their "
                "input to 4 bits: write adapter.dropout: 0"
            )
    if kind != "none" and config.distill is None:
        logger.warning(GRPO_WARNING)


def _check_card(recipe: str) -> None:
    import torch

    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        raise ConfigError(
            f"train.fp8_recipe: {recipe} needs compute capability {FP8_CAPABILITY} (Ada, Hopper or newer) and "
            f"{torch.cuda.get_device_name()} has {capability}: write train.fp8_recipe: null"
        )
