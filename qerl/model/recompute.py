"""Recompute a layer's activations in the backward pass, and keep its float32 input in 16 bits until then.

The forward pass reads the float32 stream; the recomputed activations follow from the rounded one, a rounding that does
not accumulate over layers. Activations are no more exact than that in 16 bits anyway, and it halves what the layers
keep for a long row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers.modeling_layers import GradientCheckpointingLayer


def checkpointed(
    function: Callable[..., torch.Tensor], stream: torch.Tensor, *arguments: object, dtype: torch.dtype
) -> torch.Tensor:
    """Return function(stream, *arguments), keeping only the stream, in `dtype`, and the arguments for backward."""
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
