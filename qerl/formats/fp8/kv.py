"""Keys and values in 8 bits: e4m3 codes under one scale for a layer's keys and one for its values.

vLLM's cache holds x / scale, rounded to nearest with ties to even, where what exceeds 448 becomes 448. The scales are
powers of two (`qerl.engine.kv_scales`), so that x / scale and code * scale are exact in bfloat16 and float32.

`rounded` gives a policy the keys and values that its engine attends to. Its gradient is straight-through, as if they
had not been rounded, also where they saturate.
"""

from __future__ import annotations

import torch

from qerl.formats.fp8.layout import CODE_MAX

E4M3 = torch.float8_e4m3fn


def encode(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The codes, float8_e4m3fn, of keys or values of any shape and float dtype. NaN stays NaN."""
    return (x / scale).clamp(-CODE_MAX, CODE_MAX).to(E4M3)


def decode(codes: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What `codes` (float8_e4m3fn, or uint8 of the same bits) stand for."""
    return codes.view(E4M3).to(dtype) * scale


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x as a cache in 8 bits returns it, in the dtype of x; its gradient is that of x."""
    return _Rounded.apply(x, scale)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: float) -> torch.Tensor:
        return decode(encode(x, scale), scale, x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None
