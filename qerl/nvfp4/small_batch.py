"""Products with few tokens, base and adapter in one launch; decoding at the speed of memory.

The fast twins, on Hopper, of `reference_product` and of `kernel_layout.dequantize`; how they work is said in
`cuda/linear.cu` and `cuda/decode.cu`. A weight's bytes are read once, so the limit is memory: rows * columns * 9/16.
"""

from __future__ import annotations

import torch

from qerl.nvfp4.kernel_layout import BLOCK, TILE_ROWS, KernelWeight, block_scales, codes
from qerl.nvfp4.lora import RANK_STEP, Adapter, reference_add
from qerl.nvfp4.nvrtc import Launch, kernel
from qerl.nvfp4.split import HANDOVER_SLOTS, MAX_TOKENS, SHARED_LIMIT, SHRINK_BATCH, Split, choose_split, tiles

CODE_FACTOR = 2.0**26  # what the kernel's products of code and block scale lack, see codes.cuh


def product(
    x: torch.Tensor,
    weight: KernelWeight,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    split: Split | None = None,
) -> torch.Tensor:
    """x W^T + bias + (x A^T) B^T: (tokens, in) -> (tokens, out), bfloat16, for as many tokens as `split.fits` says.

    Raises ValueError for an input or an adapter that the kernel does not take.
    """
    tokens, columns = x.shape
    rows = weight.out_features
    split = split or choose_split(rows, columns, tokens)
    _check_input(x, weight, split)
    out = x.new_empty(tokens, rows)
    row_groups = -(-rows // (TILE_ROWS * split.warps_n))
    adapter_groups, adapter_tensors, adapter_numbers = _adapter_arguments(adapter, tokens, row_groups, split)
    grid = (adapter_groups + row_groups, split.cluster, 1)
    launch = Launch(grid, 32 * split.warps, split.shared_bytes(tokens, columns), cluster=split.cluster)
    kernel("linear.cu", "nvfp4_linear", _defines(weight, tokens, split))(
        launch,
        x,
        weight.words,
        weight.scales,
        bias,
        *adapter_tensors,
        out,
        tokens,
        rows,
        columns,
        weight.out_padded,
        float(weight.alpha * CODE_FACTOR),
        *adapter_numbers,
    )
    return out


def _check_input(x: torch.Tensor, weight: KernelWeight, split: Split) -> None:
    tokens, columns = x.shape
    if columns != weight.in_features or x.dtype != torch.bfloat16 or not x.is_contiguous():
        strides = "contiguous" if x.is_contiguous() else "not contiguous"
        raise ValueError(
            f"the input is {tuple(x.shape)} {x.dtype}, {strides}; the kernel reads rows of {weight.in_features} "
            "bfloat16, one behind another"
        )
    if tokens > MAX_TOKENS or split.shared_bytes(tokens, columns) > SHARED_LIMIT:
        raise ValueError(f"{tokens} tokens of {columns} columns do not fit a block of {split}: ask `split.fits`")


def _defines(weight: KernelWeight, tokens: int, split: Split) -> tuple[str, ...]:
    """What the kernel is compiled for."""
    return (
        f"TILES={tiles(tokens)}",
        f"WARPS_N={split.warps_n}",
        f"WARPS_K={split.warps_k}",
        f"UNROLL={split.unroll}",
        f"STAGES={split.stages}",
        f"SHRINK_BATCH={SHRINK_BATCH}",
        f"TRANSPOSED={int(weight.layout.transposed)}",
        f"MARLIN={int(weight.layout.marlin_scales)}",
    )


def _adapter_arguments(
    adapter: Adapter | None, tokens: int, row_groups: int, split: Split
) -> tuple[int, tuple[torch.Tensor | None, ...], tuple[int, ...]]:
    """Clusters that make hidden values, and what the kernel takes of an adapter."""
    if adapter is None:
        return 0, (None,) * 4, (0, 0, 0, 0, 1, 0, 0)
    if adapter.handover is None or not adapter.fits_kernels:
        raise ValueError(f"the kernel takes no adapter of parts {adapter.part_rows}, A {tuple(adapter.a.shape)}")
    ranks, columns = adapter.a.shape
    parts = split.hidden_parts(columns)
    groups = ranks // RANK_STEP * parts * -(-tokens // (8 * min(tiles(tokens), 2)))
    slot = adapter.slots.setdefault((groups + row_groups) * split.cluster, len(adapter.slots))
    if slot >= HANDOVER_SLOTS or HANDOVER_SLOTS + parts * tokens * ranks > adapter.handover.numel():
        raise ValueError(f"{split} for {tokens} tokens does not fit {adapter.handover.numel()} words of handing over")
    tensors = (adapter.a, adapter.b, adapter.handover, adapter.handover[HANDOVER_SLOTS:])
    return groups, tensors, (groups, parts, slot, ranks, adapter.part_rank, *adapter.part_ends)


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


def reference_product(
    x: torch.Tensor,
    weight: KernelWeight,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
) -> torch.Tensor:
    """The same in plain torch and float64, but for the adapter's hidden values, which are rounded to bfloat16."""
    dense = reference_decoded(weight).double() * weight.alpha
    out = x.double() @ dense.t()
    if bias is not None:
        out = out + bias.double()
    return out if adapter is None else reference_add(out, x, adapter)


def reference_decoded(weight: KernelWeight) -> torch.Tensor:
    """Codes times stored block scales, float32: what `decode_` writes."""
    from qerl.nvfp4.reference import decode_e2m1

    return decode_e2m1(codes(weight)).float() * block_scales(weight).repeat_interleave(BLOCK, dim=1)
