"""The decoder layer of Qwen2, Qwen3, Llama and Mistral, in which a norm also adds to the residual stream.

Those of Qwen3-MoE, OLMoE and Mixtral are like it. The stream is kept in float32, as in the engine
(`qerl.engine.vllm.layers`). Sampler and trainer differ only by rounding, and rounding the stream to 16 bits once per
layer would cause most of that difference. Within a layer, gradients and everything that the backward pass reads are in
16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qerl.model.elementwise import RMSNorm, add_and_norm, exact_sum
from qerl.model.experts import ExpertBlock
from qerl.model.routing import Replay


def layer_forward(
    self: nn.Module, hidden_states: torch.Tensor, *, replay: Replay | None = None, **kwargs: Any
) -> torch.Tensor:
    """Replaces the forward of transformers 5.17's decoder layers of these families; returns float32 (B, T, hidden).

    `replay` are the experts to use in layers that have some.
    """
    residual, normed = _normed(self.input_layernorm, hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    total, normed = _normed(self.post_attention_layernorm, residual, attended, hidden_states)
    replayed = replay is not None and isinstance(self.mlp, ExpertBlock)
    return exact_sum(total, (hidden_states, attended), self.mlp(normed, replay) if replayed else self.mlp(normed))


def _normed(
    norm: nn.Module, residual: torch.Tensor, delta: torch.Tensor | None = None, exact: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residual + delta and its norm, computed from `exact`, the residual before it was rounded.

    A norm that does more than that is called as a module: one with noise, whose forward was replaced
    (`qerl.model.norms`), or one with hooks.
    """
    # A trained norm is wrapped (`qerl.checkpoint.adapter`); `acting` names the norm that computes.
    active = norm.acting() if hasattr(norm, "acting") else norm
    more = any("forward" in vars(one) or one._forward_hooks or one._forward_pre_hooks for one in (norm, active))
    if type(active) is RMSNorm and not more:
        return add_and_norm(residual, active, delta, exact)
    residual = residual if delta is None else exact_sum(residual, [exact], delta)
    return residual, norm(residual)
