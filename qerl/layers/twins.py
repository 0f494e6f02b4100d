"""RMSNorm, SwiGLU and rotary embedding in plain torch: what `qerl.layers.kernels` computes, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Normed(NamedTuple):
    """What a norm keeps for its backward pass: x (T, H, d), each d contiguous; weight (d,); 1 / rms, float32 (T * H,).

    `x` may be rows of a wider tensor: its tokens any stride apart, its heads beside one another.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Normed, torch.Tensor]:
    """weight * x_hat in `dtype` (default: x's), rounded once, of x or of x + `delta` (T, H, d), which is kept in that
    dtype too but normed as it was before."""
    wide, dtype = x.float() if delta is None else x.float() + delta.float(), dtype or x.dtype
    kept = x if delta is None and x.dtype == dtype else wide.to(dtype)
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return Normed(kept, weight, scale.flatten()), (weight.float() * (wide * scale)).to(dtype)


def norm_backward(
    grad: torch.Tensor,
    normed: Normed,
    trained: bool,
    skip: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients to x, in `dtype` (default: that of the kept x), and, if that is trained, to the weight (float32, (d,)).

    With x_hat = x * scale and g = grad * weight: dx = scale * (g - x_hat * mean(g * x_hat)), and on top of that `skip`,
    what x has as its gradient beside the norm.
    """
    x, weight = normed.x, normed.weight
    scale = normed.scale.view(*x.shape[:2], 1)
    hat, grad = x.float() * scale, grad.float()
    scaled = grad * weight.float()
    out = scale * (scaled - hat * (scaled * hat).mean(-1, keepdim=True))
    out = out if skip is None else out + skip.float()
    return out.to(dtype or x.dtype), (grad * hat).sum((0, 1)) if trained else None


def sum_three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a + b + c of one shape, in float32."""
    return a.float() + b.float() + c.float()


def swiglu_forward(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (T, n) of x = [gate, up] (T, 2 n), contiguous."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def swiglu_backward_(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient to x = [gate, up] (T, 2 n); `grad` (T, n) is overwritten by the forward pass's result."""
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid, wide = gate.sigmoid(), grad.float()
    silu = gate * sigmoid
    out = torch.cat([wide * up * (sigmoid + silu * (1 - sigmoid)), wide * silu], dim=-1)
    grad.copy_(silu * up)
    return out.to(x.dtype)


def rotate_(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Write x (T, H, d), rotated by the angles of cos and sin (T, d) times `sign`, into `out`, which may be x."""
    first, second = x.float().chunk(2, dim=-1)
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float() * sign
    return out.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
