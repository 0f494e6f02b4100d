"""The decoder layer of Qwen2, Qwen3, Llama and Mistral: sums of the residual stream are made where it is normed.

The stream is in float32, as in the engine (`qerl.vllm_plugin.norm`): rounded to 16 bits once a layer it makes up most
of the difference between sampler and trainer, where only roundings tell them apart. Within a layer gradients are in 16
bits, and so is what the backward pass reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qerl.layers.elementwise import RMSNorm, joined, norm_beside


def layer_forward(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The forward of transformers 5.17's decoder layers of these families; returns float32 (B, T, hidden)."""
    residual, normed = _normed(self.input_layernorm, hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    total, normed = _normed(self.post_attention_layernorm, residual, attended, hidden_states)
    return joined(total, (hidden_states, attended), self.mlp(normed))


def _normed(
    norm: nn.Module, residual: torch.Tensor, delta: torch.Tensor | None = None, exact: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual + delta, its norm), of `exact`, the residual before it was rounded. A norm that does anything more is
    called: one with noise, which has another forward (`qerl.layers.norms`), or one with hooks."""
    acts = (
        norm.acting() if hasattr(norm, "acting") else norm
    )  # a trained one's wrapper says which (`qerl.checkpoint.adapter`)
    more = any("forward" in vars(one) or one._forward_hooks or one._forward_pre_hooks for one in (norm, acts))
    if type(acts) is RMSNorm and not more:
        return norm_beside(residual, acts, delta, exact)
    residual = residual if delta is None else joined(residual, [exact], delta)
    return residual, norm(residual)
