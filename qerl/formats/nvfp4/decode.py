"""Decoding a weight at the speed of memory: the fast twin of `kernel_layout.dequantize`.

It runs on Hopper, and for weights in our own layout on every card from Ampere on.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qerl.formats.cuda.nvrtc import Launch, Variant, kernel
from qerl.formats.fp8.reference import E4M3
from qerl.formats.fp8.training import Scaled, tensor_scale
from qerl.formats.nvfp4 import slab_layout
from qerl.formats.nvfp4.kernel_layout import QERL, TILE_ROWS, KernelWeight, block_scales, codes, dequantize
from qerl.formats.nvfp4.layout import BLOCK, CODE_MAX

WARPS = 4  # per block, in both sources
WARP_ROWS, WARP_COLUMNS = 32, 256  # that a warp decodes in decode_slabs.cu
WARP_BLOCKS = 8  # blocks of 16 columns, by TILE_ROWS rows, that a warp decodes in decode.cu
OURS: Variant = ("decode_slabs.cu", ())  # the source for our own layout


def decode_(out: torch.Tensor, weight: KernelWeight, row_start: int = 0) -> torch.Tensor:
    """Write the rows of `weight` from row_start on, without the factor `weight.alpha`, into `out` (rows, in).

    The values are exact in bfloat16. Raises ValueError if `out` does not fit the weight or has another dtype.
    """
    rows, columns = out.shape
    if columns != weight.in_features or not out.is_contiguous() or row_start + rows > weight.out_features:
        raise ValueError(f"work buffer {tuple(out.shape)} at row {row_start} does not fit {weight}")
    if out.dtype != torch.bfloat16:
        raise ValueError(f"the work buffer is {out.dtype}; the kernel writes bfloat16")
    if weight.layout is QERL:
        grid = (_parts(columns, WARPS * WARP_COLUMNS), _parts(row_start % slab_layout.SLAB + rows, WARP_ROWS), 1)
        decode = kernel(OURS[0], "nvfp4_decode_slabs", OURS[1])
        decode(Launch(grid, 32 * WARPS), weight.words, weight.scales, out, row_start, rows, columns)
        return out
    grid = (_parts(columns // BLOCK, WARPS * WARP_BLOCKS), _parts(row_start % TILE_ROWS + rows, TILE_ROWS), 1)
    defines = (f"TRANSPOSED={int(weight.layout.transposed)}", f"MARLIN={int(weight.layout.marlin_scales)}")
    decode = kernel("decode.cu", "nvfp4_decode", defines)
    padded_rows = weight.scales.shape[1]
    decode(Launch(grid, 32 * WARPS), weight.words, weight.scales, out, row_start, rows, columns, padded_rows)
    return out


def reference_decoded(weight: KernelWeight) -> torch.Tensor:
    """Codes times stored block scales in float32: the values that `decode_` writes."""
    from qerl.formats.nvfp4.reference import decode_e2m1

    return decode_e2m1(codes(weight)).float() * block_scales(weight).repeat_interleave(BLOCK, dim=1)


def reference_turned(weight: KernelWeight, row_start: int, rows: int) -> Scaled:
    """The twin of `kernels.turn` in plain torch: codes (in, rows) in e4m3 and a float32 scale ()."""
    scale = tensor_scale(CODE_MAX * block_scales(weight).max(), E4M3)
    dense = reference_decoded(weight)[row_start : row_start + rows]
    return Scaled((dense / scale).to(E4M3).t().contiguous(), scale * weight.alpha)


def dequantize_by_twin_(out: torch.Tensor, weight: KernelWeight, row_start: int, scaled: bool) -> torch.Tensor:
    """`kernels.dequantize_` for our own layout in plain torch, a few rows at a time: for checks, not for speed."""
    step, end = slab_layout.ROWS, row_start + len(out)
    for block in range(row_start // step, _parts(end, step)):
        piece = replace(weight, words=weight.words[block, None], scales=weight.scales[block, None], out_features=step)
        dense = dequantize(piece, torch.float32) if scaled else reference_decoded(piece)
        first, past = max(block * step, row_start), min((block + 1) * step, end)
        out[first - row_start : past - row_start] = dense[first - block * step : past - block * step]
    return out


def _parts(size: int, part: int) -> int:
    return -(-size // part)
