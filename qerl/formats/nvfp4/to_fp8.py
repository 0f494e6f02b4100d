"""An NVFP4 weight in our own layout as the FP8 matrix that the product for a gradient to the input reads.

That product sums along the weight's rows, so it reads the transpose. Decoding to 16 bits and rounding that, which
`qerl.formats.fp8.training` does on any weight, moves 7.6 bytes per weight; codes and block scales give it for 1.6.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from qerl.formats.fp8.reference import E4M3
from qerl.formats.fp8.training import Scaled, tensor_scale
from qerl.formats.nvfp4.decode import reference_decoded
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight, block_scales
from qerl.formats.nvfp4.kernel_linear import adjacent
from qerl.formats.nvfp4.layout import CODE_MAX


def takes(linears: Sequence[nn.Module]) -> bool:
    """Whether `turned` has a kernel for these linears: neighbours in one weight of our own layout, on a card."""
    if not adjacent(linears):
        return False
    weight = linears[0].kernel_weight
    return weight.layout is QERL and weight.words.is_cuda


def turned(linears: Sequence[nn.Module]) -> Scaled:
    """The transpose (in, out) of the rows of `linears`.

    Its scale is the least power of two under which no code times the weight's largest block scale saturates, times the
    weight's factor alpha.
    """
    from qerl.formats.nvfp4.to_fp8_kernel import turn

    rows = sum(linear.out_features for linear in linears)
    return Scaled(*turn(linears[0].kernel_weight, linears[0].row_start, rows))


def reference_turned(weight: KernelWeight, row_start: int, rows: int) -> Scaled:
    """The twin of `to_fp8_kernel.turn` in plain torch: codes (in, rows) in e4m3 and a float32 scale ()."""
    scale = tensor_scale(CODE_MAX * block_scales(weight).max(), E4M3)
    dense = reference_decoded(weight)[row_start : row_start + rows]
    return Scaled((dense / scale).to(E4M3).t().contiguous(), scale * weight.alpha)
