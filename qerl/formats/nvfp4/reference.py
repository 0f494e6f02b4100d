"""NVFP4 in plain torch: pack, unpack, quantize, dequantize. It is the oracle for every kernel, and runs on CPUs.

It is bit-exact with compressed-tensors 0.19.0 (dequantize) and with what llm-compressor 0.14 writes under the scheme
NVFP4A16 (quantize). Some of their behaviour is not obvious:

1. The global scale and block amax / 6 are rounded to the weight's own dtype, so a bfloat16 model and its float32 twin
   get different scales. The global scale is reciprocal(amax) * 2688, with two roundings (generate_gparam,
   compressed_tensors/quantization/utils/helpers.py; `scalar / tensor` does that in torch).
2. If that overflows the dtype, the global scale is 1. This happens if amax is 0, or below 7.9e-36 in bfloat16 and
   float32, but already below 0.041 in float16. Then block scales become subnormal in e4m3, so quantize a float16 model
   as bfloat16.
3. A block scale that rounds to zero becomes 0.125 (calculate_qparams, same file). This happens for a block of zeros, or
   one far below amax.
4. The sign is set by x < 0: a negative weight that rounds to zero gives code 8 (-0.0), the weight -0.0 gives code 0.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import torch

from qerl.base.errors import CheckpointError
from qerl.formats.linear import check_dense
from qerl.formats.nvfp4 import layout
from qerl.formats.nvfp4.layout import BLOCK, CODE_MAX, SCALE_MAX

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; bit 3 is the sign
# Midpoints of neighbouring values, and whether a tie goes up to the next code, which it does if that code is even.
_E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
_SATURATED = 464.0  # the next e4m3 value would be 480; 448 is the nearest value up to this midpoint
ZERO_SCALE = 0.125  # what llm-compressor writes for a block scale that rounds to zero

GlobalScaleKind = Literal["amax", "pow2"]


class NVFP4Tensor(NamedTuple):
    """One packed weight: uint8 (out, in/2), float8_e4m3fn (out, in/16), float32 (1,)."""

    packed: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor

    def named(self) -> dict[str, torch.Tensor]:
        """The same tensors under their names in a checkpoint."""
        return dict(zip(layout.TENSORS, self, strict=True))


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code (uint8, same shape), ties to the even code, saturating at 6. Raises CheckpointError for NaN."""
    if values.isnan().any():
        raise CheckpointError("cannot encode NaN: e2m1 has no code for it; find out where the weights went wrong")
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for midpoint, tie_goes_up in _E2M1_STEPS:
        codes += magnitude >= midpoint if tie_goes_up else magnitude > midpoint
    return codes | ((values < 0).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of codes 0..15 (uint8, any shape); code 8 is -0.0."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes per byte, uint8 (out, in) -> (out, in/2), even column in the low nibble. Raises CheckpointError."""
    if codes.dtype != torch.uint8 or codes.ndim != 2 or codes.shape[1] % 2 or (codes.numel() and codes.max() > 15):
        raise CheckpointError(
            f"cannot pack {codes.dtype} {tuple(codes.shape)}: codes are uint8 0..15, (out, in) with an even in"
        )
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The codes of each byte, uint8 (out, in/2) -> (out, in). Raises CheckpointError."""
    if packed.dtype != torch.uint8 or packed.ndim != 2:
        raise CheckpointError(f"cannot unpack {packed.dtype} {tuple(packed.shape)}: it must be uint8 (out, in/2)")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)


def global_scale(amax: torch.Tensor | float) -> torch.Tensor:
    """float32 (1,): 448 * 6 / amax, rounded in the dtype of `amax` (the weight's); 1 if that is inf."""
    amax = torch.as_tensor(amax)
    amax = amax.clamp(min=torch.finfo(amax.dtype).tiny)
    scale = amax.reciprocal() * (SCALE_MAX * CODE_MAX)
    return scale.nan_to_num(nan=1.0, posinf=1.0).to(torch.float32).reshape(1)


def power_of_two_scale(amax: torch.Tensor | float, headroom_bits: int = 0) -> torch.Tensor:
    """float32 (1,): the largest power of two that is at most 448 * 6 / amax, divided by 2^headroom_bits.

    A power of two only shifts the exponents of the block scales, and the dequantized weights (6 significant bits) are
    exact in bfloat16. Head room lets weights grow by 2^headroom_bits under the same scale before block scales saturate;
    its cost is that small block scales become subnormal in e4m3. The scale is 1 if 448 * 6 / amax overflows float32.
    """
    amax = float(torch.as_tensor(amax).to(torch.float64))
    if amax == 0.0 or SCALE_MAX * CODE_MAX / amax > torch.finfo(torch.float32).max:
        return torch.ones(1)
    _, exponent = math.frexp(SCALE_MAX * CODE_MAX / amax)  # the quotient is m * 2^exponent with 0.5 <= m < 1
    return torch.tensor([2.0 ** (exponent - 1 - headroom_bits)])


def shared_global_scale(
    weights: Sequence[torch.Tensor], kind: GlobalScaleKind = "amax", headroom_bits: int = 0
) -> torch.Tensor:
    """The global scale, float32 (1,), of linears that are fused later (q/k/v, gate/up), by their largest amax.

    With `kind` "pow2" it is the power of two below that, see `power_of_two_scale`; only this kind has head room.
    """
    for weight in weights:
        check_dense(weight, "NVFP4", layout.check_features)
    amax = torch.stack([weight.abs().amax() for weight in weights]).amax()
    if kind == "amax":
        return global_scale(amax)
    return power_of_two_scale(amax, headroom_bits).to(amax.device)


def faults(weight: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """int32 (2,): how many blocks of `weight` (out, in) hold inf or NaN, and how many others saturate their scale."""
    blocks = weight.unflatten(1, (-1, BLOCK))
    finite = blocks.isfinite().all(dim=-1)
    saturated = finite & (exact_block_scales(blocks, global_scale) > _SATURATED)
    return torch.stack([(~finite).sum(), saturated.sum()]).int()


def quantize(weight: torch.Tensor, global_scale: torch.Tensor | None = None) -> NVFP4Tensor:
    """Quantize `weight` (out, in) of float32, bfloat16 or float16 to the bits that llm-compressor writes.

    `global_scale` is float32 (1,) from `shared_global_scale`, or None for the weight's own. Raises
    CheckpointError for unsuitable shapes and dtypes, inf and NaN.
    """
    check_dense(weight, "NVFP4", layout.check_features)
    if global_scale is None:
        global_scale = shared_global_scale([weight])
    _check_global_scale(global_scale)
    blocks = weight.unflatten(1, (-1, BLOCK))
    block_scale = exact_block_scales(blocks, global_scale).clamp(max=SCALE_MAX).to(torch.float8_e4m3fn)
    step = block_scale.to(torch.float32)
    step = step.where(step != 0, ZERO_SCALE)
    codes = encode_e2m1(blocks / (step / global_scale).unsqueeze(-1))
    return NVFP4Tensor(pack_codes(codes.flatten(1)), step.to(torch.float8_e4m3fn), global_scale.clone())


def exact_block_scales(blocks: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """The block scales (out, in / 16) of blocks (out, in / 16, 16), before they are rounded to e4m3."""
    amax = blocks.abs().amax(dim=-1)
    # Divide by a tensor, because CUDA would multiply by the reciprocal of a Python 6, which rounds differently.
    return (amax / torch.full_like(amax, CODE_MAX)) * global_scale


def dequantize(
    packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The weight (out, in) in `dtype`: e2m1 * (block_scale / global_scale) in float32, rounded once to `dtype`.

    Raises CheckpointError for shapes and dtypes that do not fit, NaN block scales, and a global scale that is not
    finite and positive.
    """
    tensors = NVFP4Tensor(packed, block_scale, global_scale).named()
    layout.check_tensors(tensors)
    layout.check_values(tensors)
    return dequantize_unchecked(packed, block_scale, global_scale, dtype)


def dequantize_unchecked(
    packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`dequantize` without the checks, which would cost too much in a forward pass.

    The global scale may be (out, 1): one for each row, where experts stand one below the other.
    """
    pairs = _byte_table(packed.device).index_select(0, packed.flatten().to(torch.int32)).view(torch.float32)
    scale = block_scale.to(torch.float32) / global_scale
    blocks = pairs.view(*block_scale.shape, BLOCK).mul_(scale.unsqueeze(-1))
    return blocks.flatten(1).to(dtype)


@cache
def _byte_table(device: torch.device) -> torch.Tensor:
    """int64 (256,) with the float32 bits of the two weights of each byte, so that one 8-byte read decodes a pair.

    Gathering rows of a (256, 2) float table instead took four times as long on a CPU.
    """
    every_byte = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)
    return decode_e2m1(unpack_codes(every_byte)).view(torch.int64).flatten()


def _check_global_scale(scale: torch.Tensor) -> None:
    if scale.dtype != torch.float32 or tuple(scale.shape) != (1,) or not 0.0 < float(scale) < float("inf"):
        raise CheckpointError(
            f"the global scale {scale.tolist()} ({scale.dtype}, shape {tuple(scale.shape)}) must be one finite "
            "positive float32 of shape (1,): use `shared_global_scale(weights)`"
        )
