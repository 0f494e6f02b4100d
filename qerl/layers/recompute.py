"""Recompute a layer's activations in the backward pass, and keep its input in 16 bits though the stream is in float32.

The forward pass reads the stream as it is; recomputed, activations follow from the rounded stream, once for each layer.
That is how exact they are in 16 bits anyway, and half of what a long row's layers keep.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def checkpointed(
    function: Callable[..., torch.Tensor], stream: torch.Tensor, *arguments: object, dtype: torch.dtype
) -> torch.Tensor:
    """function(stream, *arguments), of which nothing is kept for the backward pass but the stream, in `dtype`."""
    if stream.dtype == dtype:
        return checkpoint(function, stream, *arguments, use_reentrant=False)
    exact = [stream.detach()]  # until the forward pass has read it

    def of_kept(kept: torch.Tensor, *rest: object) -> torch.Tensor:
        value = exact.pop() if exact else kept.detach().to(stream_dtype)
        return function(_Kept.apply(kept, value), *rest)

    stream_dtype = stream.dtype
    return checkpoint(of_kept, stream.to(dtype), *arguments, use_reentrant=False)


class _Kept(torch.autograd.Function):
    """The second argument, whose gradient goes to the first, the same rounded."""

    @staticmethod
    def forward(ctx, kept: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.dtype = kept.dtype
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        return grad.to(ctx.dtype), None
