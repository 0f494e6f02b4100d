"""The decoder layer of Qwen2, Qwen3, Llama, Mistral and their mixtures of experts, made of few kernels.

`fuse_` puts our forwards into a transformers model: norms are replaced; layers, attention and MLPs get another forward.

The residual stream is kept in float32, as in the engine (`qerl.engine.vllm.layers`), and a norm also adds to it.
Sampler and trainer differ only by rounding, and rounding the stream to 16 bits once per layer would cause most of that
difference. Within a layer, gradients and everything that the backward pass reads are in 16 bits.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl.model import lora
from qerl.model.elementwise import RMSNorm, add_and_norm, exact_sum, kernels_for, rotary_, rotary_parts_
from qerl.model.lora import lora_linear, parts_of

if TYPE_CHECKING:
    from transformers.modeling_layers import GradientCheckpointingLayer

    from qerl.model.experts import Replay


def layer_forward(
    self: nn.Module, hidden_states: torch.Tensor, *, replay: Replay | None = None, **kwargs: Any
) -> torch.Tensor:
    """Replaces the forward of transformers 5.17's decoder layers of these families; returns float32 (B, T, hidden).

    `replay` are the experts to use in layers that have some.
    """
    residual, normed = _normed(self.input_layernorm, hidden_states)
    if hasattr(self, "linear_attn"):
        attended = self.linear_attn(normed, cache_params=kwargs.pop("past_key_values", None), **kwargs)
    else:
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    total, normed = _normed(self.post_attention_layernorm, residual, attended, hidden_states)
    replayed = replay is not None and getattr(self.mlp, "replays", False)
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


def attention_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replaces the forward that transformers 5.17 gives the attention modules of these families.

    q, k and v come from one product and are rotated in place. Whatever attention function the model is configured with
    is called. The backward pass holds only what that function keeps, the input of the projections and the attention
    output.
    """
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


def mlp_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Replaces the forward of a transformers MLP with gate_proj, up_proj, down_proj and SiLU.

    y = down(silu(gate(x)) * up(x)) is one autograd node that keeps only x, gate, up and the small h. The kernel that
    computes the gradients of gate and up in the backward pass also computes the input of `down` again. That keeps a
    third less memory at the cost of one more write.
    """
    gate_up, down = lora.parts_of(self.gate_proj, self.up_proj), lora.parts_of(self.down_proj)
    if gate_up is None or down is None:
        return type(self).forward(self, x)
    rows, dtype = x.reshape(-1, x.shape[-1]), lora.product_dtype(x, gate_up)
    y = _MLP.apply(rows, (gate_up, down, dtype), *lora.factors(gate_up), *lora.factors(down))
    return y.view(*x.shape[:-1], y.shape[1])


class _MLP(torch.autograd.Function):
    """See `mlp_forward`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, block: tuple, *adapter: torch.Tensor) -> torch.Tensor:
        gate_up, down, dtype = block
        ctx.gate_up, ctx.down, ctx.x_dtype, x = gate_up, down, x.dtype, x.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            x = lora.input_of(x, gate_up)
            inner, h_gate_up = lora.forward(x, gate_up)
            y, h_down = lora.forward(lora.input_of(kernels_for(x).swiglu_forward(inner), down), down)
        ctx.save_for_backward(x, inner, h_gate_up, h_down, *adapter)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, inner, h_gate_up, h_down, *_ = ctx.saved_tensors
        grad = grad.to(x.dtype)
        with torch.autocast(grad.device.type, enabled=False):
            g, upstream = lora.backward_to_h(grad, ctx.down), lora.upstream_of(grad, ctx.down)
            activation = lora.backward_to_input(upstream, g, ctx.down)
            # Where both are rounded to 8 bits next, one kernel less has to read them for their largest magnitudes.
            largest = torch.empty(2, dtype=torch.int32, device=x.device) if upstream.rounded() is not None else None
            # `activation` held its own gradient until here; this call overwrites it with the activation itself.
            grad_inner = kernels_for(x).swiglu_backward_(inner, activation, largest)
            of_inner, of_activation = (None, None) if largest is None else largest
            read = lora.input_of(activation, ctx.down)
            known = of_activation if read is activation else None
            down_grads = lora.backward_to_factors(upstream, lora.Read(read, known, spare=True), h_down, g, ctx.down)
            del activation, read
            g = lora.backward_to_h(grad_inner, ctx.gate_up)
            upstream = lora.upstream_of(grad_inner, ctx.gate_up, of_inner)
            dx = lora.backward_to_input(upstream, g, ctx.gate_up) if ctx.needs_input_grad[0] else None
            grads = lora.backward_to_factors(upstream, lora.Read(x), h_gate_up, g, ctx.gate_up)
        return None if dx is None else dx.to(ctx.x_dtype), None, *grads, *down_grads


PARTS = ("RMSNorm", "DecoderLayer", "Attention", "MLP")
FAMILIES = {  # our forwards follow transformers 5.17
    **dict.fromkeys(("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Mixtral"), PARTS),
    "Qwen3_5": ("RMSNorm", "DecoderLayer", "MLP", "GatedDeltaNet"),  # its attention has a gate
    "Olmoe": ("RMSNorm", "DecoderLayer"),  # its attention norms all heads of q and k at once
}


def fuse_(model: nn.Module) -> int:
    """Change the modules of a known family in `model`; weights are shared and names stay. Returns how many changed.

    Call it before an adapter is attached. A model of any other family is left as it is.
    """
    changed = 0
    for name, module in list(model.named_modules()):
        kind = _kind(module)
        if kind == "RMSNorm":
            parent, _, leaf = name.rpartition(".")
            eps = module.eps if (offset := float(hasattr(module, "eps"))) else module.variance_epsilon
            setattr(model.get_submodule(parent), leaf, RMSNorm(module.weight, eps, offset))
        elif kind == "DecoderLayer":
            module.forward = types.MethodType(layer_forward, module)
        elif kind == "Attention":
            module.forward = types.MethodType(attention_forward, module)
        elif kind == "GatedDeltaNet":
            from qerl.model.gated_delta import delta_forward

            module.forward = types.MethodType(delta_forward, module)
        elif kind == "MLP" and module.config.hidden_act in ("silu", "swish"):
            module.forward = types.MethodType(mlp_forward, module)
        else:
            continue
        changed += 1
    return changed


def _kind(module: nn.Module) -> str | None:
    cls = type(module)
    if not cls.__module__.startswith("transformers.models."):
        return None
    for family, parts in FAMILIES.items():
        if cls.__name__ in tuple(f"{family}{part}" for part in parts):
            return cls.__name__.removeprefix(family)
    return None


def checkpointed(
    function: Callable[..., torch.Tensor], stream: torch.Tensor, *arguments: object, dtype: torch.dtype
) -> torch.Tensor:
    """Return function(stream, *arguments), keeping only the stream, in `dtype`, and the arguments for backward.

    The forward pass reads the float32 stream; the recomputed activations follow from the one rounded to 16 bits, a
    rounding that does not accumulate over layers. Activations are no more exact than that anyway, and it halves what
    the layers keep for a long row.
    """
    if stream.dtype == dtype:
        return checkpoint(function, stream, *arguments, use_reentrant=False)
    exact = [stream.detach()]  # the forward pass takes it out; the recomputation finds the list empty

    def of_kept(kept: torch.Tensor, *rest: object) -> torch.Tensor:
        value = exact.pop() if exact else kept.detach().to(stream_dtype)
        return function(_ExactValue.apply(kept, value), *rest)

    stream_dtype = stream.dtype
    return checkpoint(of_kept, stream.to(dtype), *arguments, use_reentrant=False)


def recompute_by_(layer: GradientCheckpointingLayer, dtype: torch.dtype) -> None:
    """Let a layer of transformers recompute by `checkpointed`, whenever its `gradient_checkpointing` is set."""
    # gradient_checkpointing_enable would do this for each module of the model, and have the embeddings require a
    # gradient, which only the reentrant kind needs.
    layer._gradient_checkpointing_func = partial(checkpointed, dtype=dtype)


class _ExactValue(torch.autograd.Function):
    """Returns `value`, but sends the gradient to `kept`, the same tensor rounded."""

    @staticmethod
    def forward(ctx, kept: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.dtype = kept.dtype
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return grad.to(ctx.dtype), None
