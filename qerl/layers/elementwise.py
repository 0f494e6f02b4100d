"""RMSNorm and rotary embedding with their gradients: by Triton kernels on a GPU, by their twins elsewhere."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.layers import twins


def kernels_for(x: torch.Tensor) -> ModuleType:
    """The module that computes on x's device: `qerl.layers.kernels` or `qerl.layers.twins`."""
    if not x.is_cuda:
        return twins
    from qerl.layers import kernels

    return kernels


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), computed in float32 and rounded once, as the engine's norm does.

    transformers' norms round x_hat as well, before the product with the weight.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm over the last dimension of x (..., d); `weight` (d,) may be float32, the result has x's dtype."""
    return _RMSNorm.apply(x, weight, eps)


def rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotate the first `heads` heads of x (T, n) or (T, heads, d) in place, by cos and sin (T, d); returns x."""
    return _Rotary.apply(x, cos, sin, heads)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number a row."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, scale = kernels_for(x).norm_forward(_three_dimensional(x), weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out if x.dim() == 3 else out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, weight, scale = ctx.saved_tensors
        rows = _three_dimensional(x)
        grads = kernels_for(x).norm_backward(grad.reshape(rows.shape), rows, weight, scale, ctx.needs_input_grad[1])
        return grads[0].view(x.shape), None if grads[1] is None else grads[1].to(weight.dtype), None


class _Rotary(torch.autograd.Function):
    """Keeps cos and sin, which all layers share."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        part = _heads(x, cos, heads)
        kernels_for(x).rotate_(part, part, cos, sin, 1)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        cos, sin = ctx.saved_tensors
        out = grad.clone(memory_format=torch.contiguous_format)
        part = _heads(out, cos, ctx.heads)
        kernels_for(grad).rotate_(part, part, cos, sin, -1)
        return out, None, None, None


def _heads(x: torch.Tensor, cos: torch.Tensor, heads: int) -> torch.Tensor:
    """(T, heads, d) of the first heads of x, as a view."""
    if x.dim() == 3:
        return x
    width = cos.shape[-1]
    return x[:, : heads * width].unflatten(1, (heads, width))


def _three_dimensional(x: torch.Tensor) -> torch.Tensor:
    """x (..., d) as (tokens, heads, d), as a view where the kernels' strides allow it: heads adjacent, d contiguous."""
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous().view(-1, 1, x.shape[-1])
