"""The attention block of Qwen2, Qwen3, Llama and Mistral, with q, k and v from one product and rotated in place.

It calls whatever attention function the model is configured with. For the backward pass it holds only what that
function keeps, the input of the projections and the attention output.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl.model.elementwise import rotary_, rotary_parts_
from qerl.model.lora import lora_linear, parts_of


def attention_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replaces the forward that transformers 5.17 gives the attention modules of these families."""
    parts, cos = parts_of(self.q_proj, self.k_proj, self.v_proj), position_embeddings[0]
    if parts is None or cos.shape[-1] != self.head_dim:
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **kwargs
        )
    batch = hidden_states.shape[:-1]
    qkv = lora_linear(hidden_states.reshape(-1, hidden_states.shape[-1]), parts)
    query, key, value = (
        heads.unflatten(0, batch).transpose(1, 2)
        for heads in _rotated(self, qkv, _per_token(position_embeddings, batch))
    )
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    eager = sys.modules[type(self).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    out, weights = attend(
        self,
        query,
        key,
        value,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        **_window(self),
        **kwargs,
    )
    return self.o_proj(out.reshape(*batch, -1).contiguous()), weights


def _rotated(self: nn.Module, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Split qkv (T, all heads * d) into q, k and v (T, heads, d); norm q and k if the model does, then rotate them."""
    sizes = [proj.out_features for proj in (self.q_proj, self.k_proj, self.v_proj)]
    counts = [size // self.head_dim for size in sizes]
    if not hasattr(self, "q_norm"):
        return list(rotary_parts_(qkv, *angles, counts))
    query, key, value = (
        part.unflatten(1, (count, -1)) for part, count in zip(qkv.split(sizes, 1), counts, strict=True)
    )
    return [rotary_(self.q_norm(query), *angles), rotary_(self.k_norm(key), *angles), value]


def _per_token(
    position_embeddings: tuple[torch.Tensor, torch.Tensor], batch: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin as (T, d), with the rows of the batch one after another."""
    cos, sin = (angle.expand(*batch, -1).reshape(-1, angle.shape[-1]) for angle in position_embeddings)
    return cos, sin


def _window(self: nn.Module) -> dict[str, int | None]:
    """The sliding window as each family's attention passes it: Llama passes none, Mistral the one of its config."""
    if hasattr(self, "sliding_window"):
        return {"sliding_window": self.sliding_window}
    if self.config.model_type == "llama" or not hasattr(self.config, "sliding_window"):  # a config may hold any key
        return {}
    return {"sliding_window": self.config.sliding_window}
