"""RMSNorm, SwiGLU and rotary embedding in plain torch: the same as `qerl.model.kernels`, on any device."""

from typing import NamedTuple

import torch


class Normed(NamedTuple):
    """What a norm keeps for its backward pass: x (T, H, d), weight (d,), and `scale`, 1 / rms as float32 (T * H,).

    `x` may be part of a wider tensor: its tokens may be any stride apart, but its heads are adjacent.
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
    """Return weight * x_hat in `dtype` (default: as x), rounded once, and what the backward pass needs.

    With a `delta` (T, H, d), x + delta is normed in float32 and kept in `dtype`.
    """
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
    """Return the gradients to x, in `dtype` (default: as the kept x), and to a `trained` weight, float32 (d,).

    With x_hat = x * scale and g = grad * weight: dx = scale * (g - x_hat * mean(g * x_hat)) + skip, where `skip` is the
    gradient that x has from elsewhere.
    """
    x, weight = normed.x, normed.weight
    scale = normed.scale.view(*x.shape[:2], 1)
    hat, grad = x.float() * scale, grad.float()
    scaled = grad * weight.float()
    out = scale * (scaled - hat * (scaled * hat).mean(-1, keepdim=True))
    out = out if skip is None else out + skip.float()
    return out.to(dtype or x.dtype), (grad * hat).sum((0, 1)) if trained else None


def sum_three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a + b + c in float32, all of the same shape."""
    return a.float() + b.float() + c.float()


def swiglu_forward(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (T, n) for a contiguous x = [gate, up] (T, 2 n)."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def swiglu_backward_(x: torch.Tensor, grad: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
    """Gradient to x = [gate, up] (T, 2 n); overwrites `grad` (T, n) with the result of the forward pass.

    `largest`, int32 (2,), gets the largest magnitudes of both, as the bits of a float32.
    """
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid, wide = gate.sigmoid(), grad.float()
    silu = gate * sigmoid
    out = torch.cat([wide * up * (sigmoid + silu * (1 - sigmoid)), wide * silu], dim=-1)
    grad.copy_(silu * up)
    out = out.to(x.dtype)
    if largest is not None:
        largest.copy_(torch.stack([out.abs().max(), grad.abs().max()]).float().view(torch.int32))
    return out


def rotate_(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Write x (T, H, d) into `out`, which may be x, rotated by `sign` times the angles of cos and sin (T, d)."""
    first, second = x.float().chunk(2, dim=-1)
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float() * sign
    return out.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
