"""Block-scaled FP8 in plain torch: quantize, dequantize, and the product. It is the oracle for every kernel.

Weights are bit-equal with vLLM 0.25.1's `per_block_cast_to_fp8` (vllm/utils/deep_gemm.py), which is DeepSeek's:

1. amax is taken in float32 and is at least 1e-4, so that a block of zeros has a scale.
2. The scale is amax / 448. CUDA divides by a Python number by multiplying with its float32 reciprocal, which rounds
   differently, so we multiply on every device: a model has the same bytes wherever it is quantized.
3. A power-of-two scale is that scale rounded up. vLLM takes 2^ceil(log2(scale)), whose float32 logarithm rounds a scale
   that is at most 3e-7 above a power of two down to it; we go by the bits. No bfloat16 weight has such a scale.
4. Codes are weight * (1 / scale) in float32, rounded to the nearest e4m3 value, ties to even. Nothing saturates.

Activations follow vLLM's kernel `per_token_group_fp8_quant`: amax in float32, at least 1e-10; the scale is amax / 448,
or that rounded up to a power of two that is at least 1e-10; codes are x / scale, clamped to 448. With powers of two on
both sides every product is one of two bfloat16 numbers: an FP8 product differs from one in 16 bits only in its sums.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from qerl.formats.fp8 import layout
from qerl.formats.fp8.layout import BLOCK, CODE_MAX, blocks
from qerl.formats.linear import check_dense

ScaleKind = Literal["fp32", "pow2"]

E4M3 = torch.float8_e4m3fn
LEAST_WEIGHT, LEAST_INPUT = 1e-4, 1e-10  # what amax is at least
_MANTISSA = 0x7FFFFF  # of float32


class FP8Tensor(NamedTuple):
    """One quantized weight: float8_e4m3fn (out, in), float32 (ceil(out / 128), ceil(in / 128))."""

    codes: torch.Tensor
    scale: torch.Tensor

    def named(self) -> dict[str, torch.Tensor]:
        """The same tensors under their names in a checkpoint."""
        return dict(zip(layout.TENSORS, self, strict=True))


def quantize(weight: torch.Tensor, scales: ScaleKind = "pow2") -> FP8Tensor:
    """Quantize `weight` (out, in) of float32, bfloat16 or float16 in blocks of 128 x 128.

    Raises CheckpointError for unsuitable shapes and dtypes, inf and NaN.
    """
    check_dense(weight, "FP8", layout.check_features)
    return quantize_unchecked(weight, scales)


def quantize_unchecked(weight: torch.Tensor, scales: ScaleKind) -> FP8Tensor:
    """`quantize` of a weight that is known to be finite; nothing is read back from its device."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(blocks(rows), BLOCK, blocks(columns), BLOCK)
    scale = _scale(tiles.abs().float().amax(dim=(1, 3), keepdim=True).clamp(min=LEAST_WEIGHT), scales)
    codes = (tiles * scale.reciprocal()).to(E4M3).view_as(padded)[:rows, :columns].contiguous()
    return FP8Tensor(codes, scale.view(blocks(rows), blocks(columns)))


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out, in) in `dtype`: code * scale in float32, rounded once to `dtype`.

    Raises CheckpointError for shapes and dtypes that do not fit, NaN codes, and scales that are not positive.
    """
    tensors = {layout.CODES: codes, layout.SCALE: scale}
    layout.check_tensors(tensors)
    layout.check_values(tensors)
    return dequantize_unchecked(codes, scale, dtype)


def dequantize_unchecked(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize` of tensors that were checked when they were loaded."""
    rows, columns = codes.shape
    each = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.float() * each).to(dtype)


def quantize_input(x: torch.Tensor, scales: ScaleKind = "pow2") -> FP8Tensor:
    """Quantize activations (..., in) in groups of 128 neighbours: codes (..., in) and scales (..., ceil(in / 128))."""
    columns = x.shape[-1]
    groups = F.pad(x, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK)).float()
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_INPUT)
    scale = amax / torch.full_like(amax, CODE_MAX)  # by a tensor: CUDA multiplies by the reciprocal of a Python number
    scale = ceil_pow2(scale.clamp(min=LEAST_INPUT)) if scales == "pow2" else scale
    codes = (groups / scale).clamp(-CODE_MAX, CODE_MAX).to(E4M3)
    return FP8Tensor(codes.flatten(-2)[..., :columns].contiguous(), scale.squeeze(-1))


def dequantize_input(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 activations (..., in) of what `quantize_input` returned."""
    each = scale.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
    return codes.float() * each


def product(x: torch.Tensor, weight: FP8Tensor, scales: ScaleKind = "pow2") -> torch.Tensor:
    """x W^T (..., out) in the dtype of x (..., in): both sides in FP8, summed in float32, rounded once.

    `scales` is the kind of x's.

    Kernels add the codes' products of 128 columns before they multiply by both scales, which differs from this in
    float32's last bits.
    """
    wide = dequantize_input(*quantize_input(x, scales))
    return F.linear(wide, dequantize_unchecked(*weight, torch.float32)).to(x.dtype)


def scale_kind(scale: torch.Tensor) -> ScaleKind:
    """ "pow2" if every scale is a power of two. Waits for the device."""
    return "fp32" if bool((scale.float().view(torch.int32) & _MANTISSA).any()) else "pow2"


def faults(weight: torch.Tensor) -> torch.Tensor:
    """int32 (1,): how many elements of `weight` are inf or NaN, counted on its device."""
    return (~weight.isfinite()).sum().int().view(1)


def _scale(amax: torch.Tensor, scales: ScaleKind) -> torch.Tensor:
    """The float32 scales of these largest magnitudes."""
    scale = amax * torch.full_like(amax, CODE_MAX).reciprocal()
    return scale if scales == "fp32" else ceil_pow2(scale)


def ceil_pow2(scale: torch.Tensor) -> torch.Tensor:
    """Each float32 number rounded up to a power of two."""
    bits = scale.view(torch.int32)
    return ((bits + _MANTISSA) & ~_MANTISSA).view(torch.float32)
