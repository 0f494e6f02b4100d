"""Attention of the transformers engine with keys and values in 8 bits.

They are rounded before each product, those of earlier tokens as well, since transformers' cache holds them as they were
computed. That is what a cache in 8 bits returns, because what was rounded once is not changed by the same rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from qerl.model.kv_rounding import rounded_kv

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "qerl_kv8"


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """transformers' interface."""
    return sdpa_attention_forward(module, query, *rounded_kv(module, key, value), *given, **named)


@contextmanager
def kv_in_8_bits(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model's layers round keys and values by the scales that they have."""
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        yield
    finally:
        config._attn_implementation = before


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
