"""RMSNorm and rotary embedding with their gradients: Triton kernels on a GPU, their plain torch twins elsewhere."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.model import twins
from qerl.model.twins import Normed


def kernels_for(x: torch.Tensor) -> ModuleType:
    """The module that computes on the device of x: `qerl.model.kernels` or `qerl.model.twins`."""
    if not x.is_cuda:
        return twins
    from qerl.model import kernels

    return kernels


class RMSNorm(nn.Module):
    """gain * x / sqrt(mean(x^2) + eps), computed in float32 and rounded once, as the engine's norm does.

    The gain is the weight, or as in Qwen3.5 `offset` more, which is then added in float32.

    The norms of transformers also round x_hat before they multiply by the weight. If x is float32, as the residual
    stream is (`qerl.model.layers`), the result has the dtype that the weight had at construction: once it is trained,
    the weight may be wider.
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = weight, eps, offset
        self._dtype = weight.dtype

    @property
    def gain(self) -> torch.Tensor:
        return self.weight.float() + self.offset if self.offset else self.weight

    def dtype_of(self, x: torch.Tensor) -> torch.dtype:
        return self._dtype if x.dtype == torch.float32 else x.dtype

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.gain, self.variance_epsilon, self.dtype_of(hidden_states))

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Norm over the last dimension of x (..., d), in `dtype` (default: as x); `weight` (d,) may be float32."""
    return _RMSNorm.apply(x, weight, eps, dtype or x.dtype)


def rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (T, heads, d) in place by the angles of cos and sin (T, d); returns x."""
    return _Rotary.apply(x, cos, sin)


def rotary_parts_(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate q and k in place; returns q, k and v as (T, heads, d) views of qkv (T, all heads * d).

    `counts` are their numbers of heads.
    """
    return _RotaryParts.apply(qkv, cos, sin, list(counts))


def add_and_norm(
    x: torch.Tensor, norm: RMSNorm, delta: torch.Tensor | None = None, exact: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta (x itself without a delta) and its norm, both in the dtype of the norm.

    Their gradients are added by the kernel that writes the norm's gradient. Both results are computed from `exact`, x
    before it was rounded; it gets no gradient.
    """
    x_exact = x if exact is None else exact.detach()
    return _AddAndNorm.apply(x, delta, x_exact, norm.gain, norm.variance_epsilon, norm.dtype_of(x_exact))


def exact_sum(total: torch.Tensor, parts: Sequence[torch.Tensor], delta: torch.Tensor) -> torch.Tensor:
    """total + delta in float32, where `total` is the rounded sum of one or two `parts`.

    The value is computed from the unrounded `parts`; the gradient goes to `total` and `delta`.
    """
    return _ExactSum.apply(total, delta, *(part.detach() for part in parts))


class _RMSNorm(torch.autograd.Function):
    """Keeps x, rounded to the result's dtype, and one number per row."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        normed, out = kernels_for(x).norm_forward(_three_dimensional(x), weight, eps, None, dtype)
        ctx.save_for_backward(x if x.dtype == dtype else normed.x.view(x.shape), weight, normed.scale)
        ctx.x_dtype = x.dtype
        return out if x.dim() == 3 else out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, weight, scale = ctx.saved_tensors
        rows = _three_dimensional(x)
        normed, trained = Normed(rows, weight, scale), ctx.needs_input_grad[1]
        grads = kernels_for(x).norm_backward(grad.reshape(rows.shape), normed, trained, None, ctx.x_dtype)
        return grads[0].view(x.shape), grads[1].to(weight.dtype) if trained else None, None, None


class _AddAndNorm(torch.autograd.Function):
    """Keeps the rounded sum and one number per row."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        exact: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
    ):
        rows, ctx.x_dtype = exact.contiguous().view(-1, 1, x.shape[-1]), x.dtype
        added = None if delta is None else delta.view(rows.shape)
        normed, out = kernels_for(x).norm_forward(rows, weight, eps, added, dtype)
        total = x.view_as(x) if normed.x is rows else normed.x.view(x.shape)
        ctx.save_for_backward(total, weight, normed.scale)
        return total, out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: torch.Tensor, grad: torch.Tensor):
        total, weight, scale = ctx.saved_tensors
        rows = total.contiguous().view(-1, 1, total.shape[-1])
        normed, trained = Normed(rows, weight, scale), ctx.needs_input_grad[3]
        grads = kernels_for(total).norm_backward(
            grad.reshape(rows.shape), normed, trained, grad_total.reshape(rows.shape), ctx.x_dtype
        )
        by_x = grads[0].view(total.shape)
        by_delta = by_x if ctx.needs_input_grad[1] else None
        return by_x, by_delta, None, grads[1].to(weight.dtype) if trained else None, None, None


class _ExactSum(torch.autograd.Function):
    """Keeps nothing for its backward pass."""

    @staticmethod
    def forward(ctx, total: torch.Tensor, delta: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.dtypes = total.dtype, delta.dtype
        if len(parts) == 1:
            return parts[0].float() + delta.float()
        return kernels_for(total).sum_three(*parts, delta)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        total, delta = ctx.dtypes
        by_delta = grad.to(delta)
        by_total = by_delta if total == delta else grad.to(total)
        return by_total, by_delta, *(None for _ in ctx.needs_input_grad[2:])


class _Rotary(torch.autograd.Function):
    """Keeps cos and sin, which all layers share."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        return kernels_for(x).rotate_(x, x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        return kernels_for(grad).rotate_(out, _adjacent_heads(grad), *ctx.saved_tensors, -1), None, None


class _RotaryParts(torch.autograd.Function):
    """Keeps cos and sin; the gradients of the parts are rotated straight into their places in the gradient of qkv."""

    @staticmethod
    def forward(ctx, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, counts: list[int]):
        ctx.save_for_backward(cos, sin)
        ctx.counts = counts
        heads = qkv.detach().unflatten(1, (sum(counts), -1))  # no node saved qkv, so autograd need not see it change
        rotated = heads[:, : counts[0] + counts[1]]
        kernels_for(qkv).rotate_(rotated, rotated, cos, sin, 1)
        return heads.split(counts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        cos, sin = ctx.saved_tensors
        tokens, _, width = grads[0].shape
        out = grads[0].new_empty(tokens, sum(ctx.counts), width)
        *rotated, value = out.split(ctx.counts, 1)
        for part, grad in zip(rotated, grads[:2], strict=True):
            kernels_for(grad).rotate_(part, _adjacent_heads(grad), cos, sin, -1)
        value.copy_(grads[2])
        return out.flatten(1), None, None, None


def _adjacent_heads(x: torch.Tensor) -> torch.Tensor:
    """x (T, heads, d) as the kernels read it: any stride between tokens, but adjacent heads."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _three_dimensional(x: torch.Tensor) -> torch.Tensor:
    """x (..., d) as (tokens, heads, d), a view wherever the kernels' strides allow one."""
    if x.dim() == 3:
        return _adjacent_heads(x)
    return x.contiguous().view(-1, 1, x.shape[-1])
