"""Where a GEMM kernel keeps each NVFP4 code and block scale, in plain torch. Our own layout is in `slab_layout.py`.

vLLM's Humming and Marlin cut the weight (out, in) into tiles of 64 rows x 16 columns and store a tile as 32 lanes x 4
words of eight codes, the order in which a tensor-core fragment takes them. With, for row n and column k,

    n = 64 * tile + 16 * word + 8 * half + lane_hi        k = 16 * block + 8 * upper + 2 * lane_lo + odd

code (n, k) stands in `words[block, 128 * tile + 4 * (4 * lane_hi + lane_lo) + word]` at nibble
`4 * odd + 2 * upper + half` (Humming on wgmma, which transposes the 8 x 8 fragments) or `4 * odd + 2 * half + upper`.
Block scale (n, block) stands in `scales[block, 64 * tile + 8 * lane_hi + n // 8 % 8]`; Marlin also swaps the two middle
ones of each four, and stores e4m3 as an unsigned 5-bit exponent and 3-bit mantissa.

Read in humming-kernels 0.1.10 (`kernel/process.cuh`, `utils/weight.py`) and vllm 0.25.1 (`gptq_marlin_repack`,
`marlin_utils_fp4.py`). The GPU tests recover the same permutation by packing known codes with the kernels' own
packers, and `qerl/nvfp4/decode.py` and `kernels.py` are the fast twins of this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerl.nvfp4 import slab_layout

TILE_ROWS = 64
BLOCK = 16
WORDS_PER_TILE = 128


@dataclass(frozen=True)
class KernelLayout:
    """How one kernel orders what it reads."""

    name: str  # "qerl", "humming" or "marlin"
    transposed: bool = False  # nibble order: upper before half
    marlin_scales: bool = False  # scales reordered and re-encoded as Marlin's unsigned e5m3


QERL = KernelLayout("qerl")
HUMMING_WGMMA = KernelLayout("humming", transposed=True, marlin_scales=False)
HUMMING_MMA = KernelLayout("humming", transposed=False, marlin_scales=False)
MARLIN = KernelLayout("marlin", transposed=False, marlin_scales=True)


@dataclass(frozen=True)
class KernelWeight:
    """One (possibly fused) linear as its kernel keeps it; the tensors are the kernel's own, never copies.

    `words` int32 (in_padded / 16, 2 * out_padded), `scales` one byte each (in_padded / 16, out_padded); of QERL as
    `slab_layout.pack` makes them. A code times its block scale times `alpha` is the checkpoint's weight, where `alpha`
    is 1 / global scale but for a power of two that Marlin moves out of the block scales.
    """

    layout: KernelLayout
    words: torch.Tensor
    scales: torch.Tensor
    out_features: int
    in_features: int
    global_scale: float  # 448 * 6 / amax, as in the checkpoint
    scale_factor: float = 1.0  # what the stored block scales were multiplied by, a power of two

    @property
    def alpha(self) -> float:
        """What the product of input and (code * stored block scale) has to be multiplied by."""
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
    """The weight (out_features, in_features) as compressed-tensors decodes the checkpoint: bit-exact, slow."""
    from qerl.nvfp4.reference import decode_e2m1

    scales = block_scales(weight) / weight.scale_factor
    scales = scales / torch.full_like(scales, weight.global_scale)  # CUDA divides by a number through its reciprocal
    values = decode_e2m1(codes(weight)).float() * scales.repeat_interleave(BLOCK, dim=1)
    return values.to(dtype)


def scales_marlin_drops(scales: torch.Tensor) -> int:
    """How many block scales (e4m3, of one fused linear) Marlin's encoding turns into zeros, and 16 weights with each.

    It moves the largest power of two that keeps all under 448, and drops what is then under 2^-6, e4m3's subnormals.
    """
    values = scales.float()
    largest = values.max()
    factor = (448 / largest).log2().floor().exp2() if largest > 0 else 1.0
    return int(((values > 0) & (values * factor < 2**-6)).sum())


def _grid(weight: KernelWeight, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = weight.words.device
    return torch.arange(weight.out_features, device=device)[:, None], torch.arange(columns, device=device)[None]
