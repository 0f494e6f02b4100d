"""Products with few tokens, base and adapter in two launches; decoding at the speed of memory.

The fast twins, on Hopper, of `reference_product` and of `kernel_layout.dequantize`; the kernels and how they work are
in `cuda/small_batch.cu`. A weight's bytes are read once, so the limit is memory: rows * columns * 9/16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch

from qerl.nvfp4.kernel_layout import BLOCK, TILE_ROWS, KernelWeight, block_scales, codes
from qerl.nvfp4.nvrtc import Launch, kernel

SOURCE = "small_batch.cu"
MAX_TOKENS = 64
CODE_FACTOR = 2.0**26  # what the kernel's products of code and block scale lack, see the source


@dataclass(frozen=True)
class Split:
    """How a product is cut up: warps of a block over rows and over K, and blocks of a cluster over K."""

    cluster: int
    warps_n: int = 4
    warps_k: int = 2
    unroll: int = 4
    stages: int = 4

    def shared_bytes(self, tokens: int, columns: int) -> int:
        """Of a block: its slice of x and its rings, and later in the same place the partial sums."""
        padded, blocks = 8 * tiles(tokens), columns // BLOCK
        slice_bytes = padded * (-(-blocks // self.cluster) * 2 * BLOCK + 16)
        rings = self.warps_n * self.warps_k * self.stages * self.unroll * BLOCK * 36
        return max(slice_bytes + rings, self.warps_k * padded * (TILE_ROWS * self.warps_n + 4) * 4)


def tiles(tokens: int) -> int:
    """Tiles of 8 tokens that a launch works on: 1, 2, 4 or 8."""
    return 1 if tokens <= 8 else 1 << (-(-tokens // 8) - 1).bit_length()


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels of this file run there: a Hopper card, and the CUDA bindings that torch brings."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def choose_split(rows: int, columns: int, tokens: int) -> Split:
    """The fastest measured on an H200, by how many groups of 256 rows there are to fill its 132 processors."""
    groups = -(-rows // (4 * TILE_ROWS))
    split = Split(4, 4, 1, 4, 3) if groups >= 64 else Split(8, 4, 2, 2, 3)
    if groups < 64 and columns >= 8192:
        split = Split(8, 4, 4 if tokens <= 8 else 2, 4, 3)
    if tokens > 8 and groups >= 64:
        split = Split(8, 4, 1, 4, 3)
    cluster = split.cluster
    while cluster > 1 and columns // BLOCK < 4 * cluster:
        cluster //= 2
    return replace(split, cluster=cluster)


def product(
    x: torch.Tensor,
    weight: KernelWeight,
    bias: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
    part_rows: Sequence[int] = (),
    split: Split | None = None,
) -> torch.Tensor:
    """x W^T + bias + hidden B^T: (tokens, in) -> (tokens, out), bfloat16, at most MAX_TOKENS tokens.

    `hidden` (tokens, ranks) from `shrink`; `lora_b` (out,
    ranks), block-diagonal over parts of `part_rows` rows and equal ranks, a multiple of 16 each, at most three.
    """
    tokens, columns = x.shape
    rows = weight.out_features
    split = split or choose_split(rows, columns, tokens)
    out = x.new_empty(tokens, rows)
    ranks = 0 if hidden is None else hidden.shape[1]
    ends = [sum(part_rows[: index + 1]) for index in range(len(part_rows))] or [rows]
    defines = (
        f"TILES={tiles(tokens)}",
        f"WARPS_N={split.warps_n}",
        f"WARPS_K={split.warps_k}",
        f"UNROLL={split.unroll}",
        f"STAGES={split.stages}",
        f"TRANSPOSED={int(weight.layout.transposed)}",
        f"MARLIN={int(weight.layout.marlin_scales)}",
    )
    groups = -(-rows // (TILE_ROWS * split.warps_n))
    launch = Launch(
        (groups, split.cluster, 1),
        32 * split.warps_n * split.warps_k,
        split.shared_bytes(tokens, columns),
        split.cluster,
    )
    kernel(SOURCE, "nvfp4_linear", defines)(
        launch,
        x,
        weight.words,
        weight.scales,
        bias,
        hidden,
        lora_b,
        out,
        tokens,
        rows,
        columns,
        weight.out_padded,
        float(weight.alpha * CODE_FACTOR),
        ranks,
        ranks // max(len(ends), 1) or 1,
        ends[0],
        ends[1] if len(ends) > 1 else rows,
    )
    return out


def shrink(
    x: torch.Tensor, lora_a: torch.Tensor, cluster: int | None = None, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """x A^T in bfloat16: (tokens, in), (ranks, in) -> (tokens, ranks), into `hidden` if given; ranks in steps of 16."""
    tokens, columns = x.shape
    ranks = lora_a.shape[0]
    per_block = 1 if tokens <= 8 else 2
    hidden = x.new_empty(tokens, ranks) if hidden is None else hidden
    cluster = cluster or (8 if columns >= 8192 else 4)
    warps = 16 if columns >= 8192 else 8
    launch = Launch((ranks // 16, cluster, -(-tokens // (8 * per_block))), 32 * warps, 0, cluster)
    kernel(SOURCE, "lora_shrink", (f"TILES={per_block}", f"WARPS={warps}"))(
        launch, x, lora_a, hidden, tokens, columns, ranks
    )
    return hidden


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
    decode = kernel(SOURCE, "nvfp4_decode", defines)
    decode(launch, weight.words, weight.scales, out, row_start, rows, columns, weight.out_padded)
    return out


def reference_product(
    x: torch.Tensor,
    weight: KernelWeight,
    bias: torch.Tensor | None = None,
    lora_a: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch and float64, but for the adapter's hidden values, which are rounded to bfloat16."""
    dense = reference_decoded(weight).double() * weight.alpha
    out = x.double() @ dense.t()
    if bias is not None:
        out = out + bias.double()
    if lora_a is not None:
        hidden = (x.double() @ lora_a.double().t()).to(torch.bfloat16)
        out = out + hidden.double() @ lora_b.double().t()
    return out


def reference_decoded(weight: KernelWeight) -> torch.Tensor:
    """Codes times stored block scales, float32: what `decode_` writes."""
    from qerl.nvfp4.reference import decode_e2m1

    return decode_e2m1(codes(weight)).float() * block_scales(weight).repeat_interleave(BLOCK, dim=1)
