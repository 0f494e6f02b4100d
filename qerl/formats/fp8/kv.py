"""Keys and values in 8 bits: e4m3 codes under one scale for a layer's keys and one for its values.

vLLM's cache holds x / scale, rounded to nearest with ties to even, where what exceeds 448 becomes 448. A scale is a
power of two, so that x / scale and code * scale are exact in bfloat16 and float32. Under it the largest magnitude seen
has one bit of head room: e4m3 rounds alike under any such scale, down to 2^-15 of the largest.

`rounded` gives a policy the keys and values that its engine attends to. Its gradient is straight-through, as if they
had not been rounded, also where they saturate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qerl.base.errors import EngineError
from qerl.formats.fp8.layout import CODE_MAX

E4M3 = torch.float8_e4m3fn


def encode(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The codes, float8_e4m3fn, of keys or values of any shape and float dtype. NaN stays NaN."""
    return (x / scale).clamp(-CODE_MAX, CODE_MAX).to(E4M3)


def decode(codes: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What `codes` (float8_e4m3fn, or uint8 of the same bits) stand for."""
    return codes.view(E4M3).to(dtype) * scale


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x as a cache in 8 bits returns it, in the dtype of x; the gradient passes unchanged."""
    return _Rounded.apply(x, scale)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: float) -> torch.Tensor:
        return decode(encode(x, scale), scale, x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


HEADROOM = 2.0


@dataclass(frozen=True)
class Ranges:
    """The largest magnitudes of a layer's queries, keys and values, as attention gets them."""

    query: float
    key: float
    value: float


@dataclass(frozen=True)
class KVScales:
    """What a layer's queries, keys and values are divided by before they are rounded."""

    query: float
    key: float
    value: float


def scales_of(ranges: Mapping[int, Ranges]) -> dict[int, KVScales]:
    """The scales of each layer, by its number. Raises EngineError for magnitudes that are not finite."""
    return {
        layer: KVScales(*(_scale(value, layer) for value in (one.query, one.key, one.value)))
        for layer, one in ranges.items()
    }


def _scale(largest: float, layer: int) -> float:
    if not math.isfinite(largest):
        raise EngineError(
            f"keys and values of layer {layer} are not finite, so they have no scale: the policy has diverged; lower "
            "optim.learning_rate, or go on from an earlier checkpoint"
        )
    return 2.0 ** math.ceil(math.log2(max(largest, 2.0**-20) * HEADROOM / CODE_MAX))
