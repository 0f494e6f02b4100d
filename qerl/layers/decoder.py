"""The decoder layer of Qwen2, Qwen3, Llama and Mistral: sums of the residual stream are made where it is normed.

The stream is rounded where the engine rounds it, once a layer, at its end. What torch.compile makes of vLLM's layer
norms and adds to the sum of stream and attention as it is in float32; the rounded one is what the next layer reads. On
random weights of a 7B, where only roundings tell trainer and sampler apart, mismatch_kl is a fifth lower for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qerl.layers.elementwise import RMSNorm, joined, norm_beside


def layer_forward(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The forward of transformers 5.17's decoder layers of these families."""
    residual, normed = _normed(self.input_layernorm, hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    total, normed = _normed(self.post_attention_layernorm, residual, attended)
    out = self.mlp(normed)
    alike = residual.dtype == attended.dtype == out.dtype
    return joined(total, (residual, attended), out) if alike else total + out


def _normed(
    norm: nn.Module, residual: torch.Tensor, delta: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual + delta, its norm). A norm that does anything more is called: one with noise, which has another forward
    (`qerl.norms`), or one with hooks."""
    acts = norm.acting() if hasattr(norm, "acting") else norm  # a trained one's wrapper says which (`qerl.adapter`)
    more = any("forward" in vars(one) or one._forward_hooks or one._forward_pre_hooks for one in (norm, acts))
    if type(acts) is RMSNorm and not more and (delta is None or delta.dtype == residual.dtype):
        return norm_beside(residual, acts, delta)
    residual = residual if delta is None else residual + delta
    return residual, norm(residual)
