"""Where a GEMM kernel keeps each NVFP4 code and block scale, in plain torch. Our own layout is in `slab_layout.py`.

vLLM's Humming and Marlin kernels divide the weight (out, in) into tiles of 64 rows x 16 columns and store a tile as 32
lanes x 4 words of eight codes, in the order of a tensor-core fragment. Write row n and column k as

    n = 64 * tile + 16 * word + 8 * half + lane_hi        k = 16 * block + 8 * upper + 2 * lane_lo + odd

Then code (n, k) is in `words[block, 128 * tile + 4 * (4 * lane_hi + lane_lo) + word]`, at nibble
`4 * odd + 2 * upper + half` (Humming on wgmma, which transposes the 8 x 8 fragments) or `4 * odd + 2 * half + upper`.
Block scale (n, block) is in `scales[block, 64 * tile + 8 * lane_hi + n // 8 % 8]`. Marlin also swaps the middle two of
every four scales, and stores e4m3 as an unsigned number of 5 exponent and 3 mantissa bits.

Sources: humming-kernels 0.1.10 (`kernel/process.cuh`, `utils/weight.py`) and vllm 0.25.1 (`gptq_marlin_repack`,
`marlin_utils_fp4.py`). The GPU tests recover the same permutation by packing known codes with the kernels' own
packers. `qerl/formats/nvfp4/decode.py` and `kernels.py` are the fast twins of this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerl.formats.nvfp4 import slab_layout
from qerl.formats.nvfp4.layout import BLOCK, SCALE_MAX

TILE_ROWS = 64
WORDS_PER_TILE = 128


@dataclass(frozen=True)
class KernelLayout:
    """In which order one kernel reads codes and block scales."""

    name: str  # "qerl", "humming" or "marlin"
    transposed: bool = False  # nibble order: upper before half
    marlin_scales: bool = False  # scales are reordered, and re-encoded as Marlin's unsigned e5m3


QERL = KernelLayout("qerl")
HUMMING_WGMMA = KernelLayout("humming", transposed=True, marlin_scales=False)
HUMMING_MMA = KernelLayout("humming", transposed=False, marlin_scales=False)
MARLIN = KernelLayout("marlin", transposed=False, marlin_scales=True)


@dataclass(frozen=True)
class KernelWeight:
    """One (possibly fused) linear as its kernel keeps it; the tensors are the kernel's own, never copies.

    `words` is int32 (in_padded / 16, 2 * out_padded), `scales` has one byte per block scale (in_padded / 16,
    out_padded); in the QERL layout both are as `slab_layout.pack` returns them. The checkpoint's weight is code * block
    scale * `alpha`, where `alpha` is 1 / global scale, divided by the power of two that Marlin moves into its scales.
    """

    layout: KernelLayout
    words: torch.Tensor
    scales: torch.Tensor
    out_features: int
    in_features: int
    global_scale: float  # 448 * 6 / amax, as in the checkpoint
    scale_factor: float = 1.0  # the power of two that the stored block scales were multiplied by

    @property
    def alpha(self) -> float:
        """The factor that the product of the input and (code * stored block scale) still needs."""
        return 1.0 / (self.global_scale * self.scale_factor)


def codes(weight: KernelWeight) -> torch.Tensor:
    """The e2m1 codes (out_features, in_features), uint8."""
    if weight.layout is QERL:
        return slab_layout.codes(weight.words, weight.out_features, weight.in_features)
    n, k = _grid(weight, weight.in_features)
    lane = 4 * (n % 8) + k % 8 // 2
    column = WORDS_PER_TILE * (n // TILE_ROWS) + 4 * lane + n % TILE_ROWS // 16
    odd, upper, half = k % 2, k % 16 // 8, n % 16 // 8
    first, second = (upper, half) if weight.layout.transposed else (half, upper)
    words = weight.words[k // BLOCK, column]
    return (words >> (4 * (4 * odd + 2 * first + second)) & 15).to(torch.uint8)


def block_scales(weight: KernelWeight) -> torch.Tensor:
    """The stored block scales (out_features, in_features / 16), decoded to float32."""
    if weight.layout is QERL:
        return slab_layout.block_scales(weight.scales, weight.out_features, weight.in_features)
    n, block = _grid(weight, weight.in_features // BLOCK)
    group = n // 8 % 8
    if weight.layout.marlin_scales:
        group = (group & 4) | (group & 1) << 1 | group >> 1 & 1
    stored = weight.scales.view(torch.uint8)[block, TILE_ROWS * (n // TILE_ROWS) + 8 * (n % 8) + group]
    if not weight.layout.marlin_scales:
        return stored.view(torch.float8_e4m3fn).float()
    exponent, mantissa = stored.int() >> 3, stored.int() & 7
    return torch.where(stored == 0, 0.0, torch.ldexp(1 + mantissa.float() / 8, exponent - 22))


def dequantize(weight: KernelWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out_features, in_features), bit-exact with compressed-tensors' decoding of the checkpoint; slow."""
    from qerl.formats.nvfp4.reference import decode_e2m1

    scales = block_scales(weight) / weight.scale_factor
    # Dividing by a Python number would multiply by its reciprocal on CUDA, which rounds differently.
    scales = scales / torch.full_like(scales, weight.global_scale)
    values = decode_e2m1(codes(weight)).float() * scales.repeat_interleave(BLOCK, dim=1)
    return values.to(dtype)


def marlin_scale_factor(scales: torch.Tensor) -> float:
    """The power of two by which Marlin multiplies block scales (e4m3, any shape): the largest that keeps all of them at
    or below 448."""
    largest = scales.float().max()
    return float((SCALE_MAX / largest).log2().floor().exp2()) if largest > 0 else 1.0


def scales_marlin_drops(scales: torch.Tensor) -> int:
    """How many block scales (e4m3, of one fused linear) Marlin's encoding turns into 0, together with 16 weights each.

    It multiplies by `marlin_scale_factor`, and then sets those below 2^-6, the subnormals of e4m3, to zero.
    """
    values = scales.float()
    return int(((values > 0) & (values * marlin_scale_factor(scales) < 2**-6)).sum())


def _grid(weight: KernelWeight, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = weight.words.device
    return torch.arange(weight.out_features, device=device)[:, None], torch.arange(columns, device=device)[None]
