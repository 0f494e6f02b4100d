"""Decoding a weight at the speed of memory: the fast twin of `kernel_layout.dequantize` on Hopper."""

from __future__ import annotations

import torch

from qerl.nvfp4.kernel_layout import BLOCK, TILE_ROWS, KernelWeight, block_scales, codes
from qerl.nvfp4.nvrtc import Launch, kernel


def decode_(out: torch.Tensor, weight: KernelWeight, row_start: int = 0) -> torch.Tensor:
    """Write rows row_start... of `weight`, without the factor `weight.alpha`, into `out` (rows, in): exact."""
    rows, columns = out.shape
    if columns != weight.in_features or not out.is_contiguous() or row_start + rows > weight.out_features:
        raise ValueError(f"work buffer {tuple(out.shape)} at row {row_start} does not fit {weight}")
    if out.dtype != torch.bfloat16:
        raise ValueError(f"the work buffer is {out.dtype}; the kernel writes bfloat16")
    blocks, count = columns // BLOCK, -(-(row_start % TILE_ROWS + rows) // TILE_ROWS)
    defines = (f"TRANSPOSED={int(weight.layout.transposed)}", f"MARLIN={int(weight.layout.marlin_scales)}")
    launch = Launch((-(-blocks // 32), count, 1), 128)
    decode = kernel("decode.cu", "nvfp4_decode", defines)
    decode(launch, weight.words, weight.scales, out, row_start, rows, columns, weight.out_padded)
    return out


def reference_decoded(weight: KernelWeight) -> torch.Tensor:
    """Codes times stored block scales, float32: what `decode_` writes."""
    from qerl.nvfp4.reference import decode_e2m1

    return decode_e2m1(codes(weight)).float() * block_scales(weight).repeat_interleave(BLOCK, dim=1)
