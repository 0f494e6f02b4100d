"""Packing a dense weight into our own layout at the speed of memory: the fast twin of `reference.quantize`.

Its limit is the time to read the matrix and to write the packed weight, 4.56 bytes per float32 weight. What does not
fit is counted on the way: a check before would read every matrix twice.
"""

from __future__ import annotations

import torch

from qerl.formats.cuda.nvrtc import Launch, has_kernels, kernel
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
from qerl.formats.nvfp4.layout import BLOCK
from qerl.formats.nvfp4.slab_layout import SLAB, UNIT

WARPS = 4  # per block; each takes a unit of a slab
ALIGNMENT = 8  # bytes of the widest read
DEFINES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("MASTER_BF16",)}


def takes(weight: KernelWeight, row_start: int, matrix: torch.Tensor) -> bool:
    """Whether the kernels read `matrix` (rows, in) and write it to the rows of `weight` from row_start on.

    Rows must begin with a slab of 16, and end with one or with the weight.
    """
    end = row_start + len(matrix)
    return (
        weight.layout is QERL
        and has_kernels(weight.words.device)
        and matrix.device == weight.words.device
        and matrix.dtype in DEFINES
        and matrix.is_contiguous()
        and matrix.data_ptr() % ALIGNMENT == 0
        and matrix.shape[1] == weight.in_features
        and matrix.shape[1] % BLOCK == 0
        and row_start % SLAB == 0
        and (end % SLAB == 0 or end == weight.out_features)
    )


def pack_(weight: KernelWeight, row_start: int, matrix: torch.Tensor) -> torch.Tensor:
    """Overwrite the rows of `weight` from row_start on by `matrix`, quantized as by `reference.quantize`, in place.

    Call it only if `takes` says so. Returns `reference.faults` of the matrix, int32 (2,) on the card. Block scales that
    do not fit saturate, and inf and NaN give any code.
    """
    rows, columns = matrix.shape
    counts = torch.zeros(2, dtype=torch.int32, device=matrix.device)
    launch = Launch((-(-columns // (UNIT * WARPS)), -(-rows // SLAB), 1), 32 * WARPS)
    tensors = (matrix, weight.words, weight.scales, counts)
    arguments = (row_start // SLAB, rows, columns, float(weight.global_scale))
    kernel("pack.cu", "nvfp4_pack", DEFINES[matrix.dtype])(launch, *tensors, *arguments)
    return counts
