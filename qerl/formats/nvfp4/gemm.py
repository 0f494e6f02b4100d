"""Products with up to 256 tokens on Hopper, base and adapter in one launch, with the codes decoded in registers.

The fast twin of `reference_product`; `qerl/formats/cuda/sources/gemm.cu` explains how it works. Its limits are the size
of the weight, rows * columns * 9/16 bytes, divided by the memory bandwidth, and its 2 * tokens * rows * columns
operations.
"""

from __future__ import annotations

from functools import cache

import torch

from qerl.base.errors import EngineError
from qerl.formats.cuda.nvrtc import (
    Kernel,
    Launch,
    TensorMap,
    Variant,
    has_kernels,
    has_portable_kernels,
    kernel,
    tensor_map,
)
from qerl.formats.nvfp4.decode import reference_decoded
from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
from qerl.formats.nvfp4.lora import Adapter, reference_add
from qerl.formats.nvfp4.ways import (
    CLUSTERS,
    MAX_HEAPS,
    MAX_PARTS,
    MAX_SUMS,
    MAX_TOKENS,
    RANK_STEP,
    TOKEN_TILES,
    UNIT,
    WARPS,
    Tiling,
    by_memory,
    choose_tiling,
    fits,
    token_tile,
)

CODE_FACTOR = 2.0**19  # by which the kernel's products of code and block scale are too small, see slabs.cuh


def product(
    x: torch.Tensor,
    weight: KernelWeight,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """x W^T + bias + (x A^T) B^T: (tokens, in) -> (tokens, out), bfloat16, for as many tokens as `ways.fits` allows.

    `out` is a contiguous tensor to write into, and `tiling` is for measurements. Two products on a device must not
    overlap, because they share work space. The kernel reads the weight and `adapter.a` while the preceding launch may
    still be running, so a kernel that writes them must not come directly before this one. Raises ValueError for an
    input, a weight or an adapter that the kernel does not take, EngineError if the first call on a device is being
    captured, or if the card does not hold the clusters of the given `tiling`.
    """
    tokens, columns = x.shape
    rows, ranks = weight.out_features, 0 if adapter is None else adapter.a.shape[0]
    check(x, weight, adapter)
    tiling = _default(rows, columns, tokens) if tiling is None else tiling
    _check_clusters(rows, tokens, tiling)
    space = work_space(x.device, 1, tiling.cluster)
    parts, hidden = space.hidden(tiling.hidden_numbers(tokens, columns, ranks), (tokens, ranks))
    out = x.new_empty(tokens, rows) if out is None else out
    adapter_numbers = (0, 1, 0, 0) if adapter is None else (ranks, adapter.part_rank, *adapter.part_ends)
    _kernel(tokens, tiling)(
        _launch(space.blocks, tokens, tiling),
        *_maps(x, tiling, hidden, adapter),
        weight.words,
        weight.scales,
        x,
        None if adapter is None else adapter.a,
        None if adapter is None else adapter.b,
        bias,
        out,
        hidden,
        space.flagged_hidden,
        parts,
        space.sums,
        space.counters,
        tokens,
        rows,
        columns,
        float(weight.alpha * CODE_FACTOR),
        *adapter_numbers,
    )
    return out


def _default(rows: int, columns: int, tokens: int) -> Tiling:
    tiling = choose_tiling(rows, columns, tokens)
    held = not tiling.cluster or holds_clusters(token_tile(tokens), tiling)
    return tiling if held else by_memory(rows, columns, tokens)


def _check_clusters(rows: int, tokens: int, tiling: Tiling) -> None:
    if not (size := tiling.cluster):
        return
    if rows > CLUSTERS[size] * tiling.rows:
        raise ValueError(f"{rows} rows need more than {CLUSTERS[size]} clusters of {size} blocks")
    if not holds_clusters(token_tile(tokens), tiling):
        raise EngineError(f"this card does not hold {CLUSTERS[size]} clusters of {size} blocks at once")


@cache
def holds_clusters(tokens: int, tiling: Tiling) -> bool:
    """Whether the current card holds all blocks of a launch at once: they wait for each other, and cards differ."""
    blocks = CLUSTERS[tiling.cluster] * tiling.cluster
    return _kernel(tokens, tiling).clusters_at_once(_launch(blocks, tokens, tiling)) >= CLUSTERS[tiling.cluster]


def _kernel(tokens: int, tiling: Tiling) -> Kernel:
    return kernel("gemm.cu", "nvfp4_gemm", defines_of(tokens, tiling))


def _launch(blocks: int, tokens: int, tiling: Tiling) -> Launch:
    threads, cluster = 32 * (WARPS + 4), (max(1, tiling.cluster), 1, 1)
    return Launch((blocks, 1, 1), threads, tiling.shared_bytes(tokens), cluster, early=True)


def split_product(
    x: torch.Tensor, weight: KernelWeight, bias: torch.Tensor | None = None, adapter: Adapter | None = None
) -> torch.Tensor:
    """`product` for any number of tokens: launches of MAX_TOKENS tokens, and one for the rest.

    On cards without Hopper's instructions they are launches of `portable.product`.
    """
    from qerl.formats.nvfp4 import portable  # it imports this module

    one = portable.product if has_portable_kernels(x.device) and not has_kernels(x.device) else product
    if len(x) <= MAX_TOKENS:
        return one(x, weight, bias, adapter)
    out = x.new_empty(len(x), weight.out_features)
    for some, of_out in zip(x.split(MAX_TOKENS), out.split(MAX_TOKENS), strict=True):
        one(some, weight, bias, adapter, of_out)
    return out


def takes(rows: int, columns: int, ranks: int = 0) -> bool:
    """Whether `split_product` takes a weight of this shape for any number of tokens."""
    return all(fits(rows, columns, tokens, ranks) for tokens in TOKEN_TILES)


def variants(rows: int, columns: int) -> list[Variant]:
    """What has to be compiled for weights of this shape, for all numbers of tokens; the slowest come first."""
    defines = [defines_of(tokens, choose_tiling(rows, columns, tokens)) for tokens in reversed(TOKEN_TILES)]
    return [("gemm.cu", each) for each in defines]


def _maps(x: torch.Tensor, tiling: Tiling, hidden: torch.Tensor, adapter: Adapter | None) -> tuple[TensorMap, ...]:
    """The matrices that the copy engine reads in tiles: x, the hidden values and the adapter's B."""
    tokens, columns = x.shape
    tile = token_tile(tokens)
    x_map = tensor_map(x.data_ptr(), (tokens, columns), (tile, UNIT), swizzled=True)
    if adapter is None:
        return x_map, x_map, x_map
    hidden_map = tensor_map(hidden.data_ptr(), tuple(hidden.shape), (tile, UNIT), swizzled=True)
    return x_map, hidden_map, tensor_map(adapter.b.data_ptr(), tuple(adapter.b.shape), (tiling.rows, RANK_STEP))


def reference_product(
    x: torch.Tensor,
    weight: KernelWeight,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
) -> torch.Tensor:
    """The same as `product` in plain torch and float64; only the adapter's hidden values are rounded to bfloat16."""
    dense = reference_decoded(weight).double() * weight.alpha
    out = x.double() @ dense.t()
    if bias is not None:
        out = out + bias.double()
    return out if adapter is None else reference_add(out, x, adapter)


def check(x: torch.Tensor, weight: KernelWeight, adapter: Adapter | None) -> None:
    """Raise ValueError for an input, a weight or an adapter that kernels of our layout do not take at any size."""
    tokens, columns = x.shape
    if columns != weight.in_features or x.dtype != torch.bfloat16 or not x.is_contiguous():
        strides = "contiguous" if x.is_contiguous() else "not contiguous"
        raise ValueError(
            f"the input is {tuple(x.shape)} {x.dtype}, {strides}; the kernel reads rows of {weight.in_features} "
            "bfloat16, one behind another"
        )
    if weight.layout is not QERL:
        raise ValueError(f"the weight lies as {weight.layout.name} keeps it; the kernel reads qerl's layout")
    if not fits(weight.out_features, columns, tokens):
        raise ValueError(f"{tokens} tokens of a weight ({weight.out_features}, {columns}) do not fit: ask `ways.fits`")
    if adapter is None:
        return
    if not adapter.fits_kernels or not fits(weight.out_features, columns, tokens, adapter.a.shape[0]):
        raise ValueError(f"the kernel takes no adapter of parts {adapter.part_rows}, A {tuple(adapter.a.shape)}")


def defines_of(tokens: int, tiling: Tiling) -> tuple[str, ...]:
    """The macros that the kernel is compiled with."""
    return (
        f"TOKENS={token_tile(tokens)}",
        f"SLABS={tiling.slabs}",
        f"STAGES={tiling.stages}",
        f"BATCH={tiling.batch}",
        f"IN_LOOP={int(tiling.in_loop)}",
        f"CLUSTER={tiling.cluster}",
        f"MAX_PARTS={MAX_PARTS}",
        f"MAX_HEAPS={MAX_HEAPS}",
    )


class WorkSpace:
    """Memory through which the blocks of a launch exchange values, on one device.

    It only grows and never moves, because CUDA graphs hold its addresses.
    """

    def __init__(self, device: torch.device, occupancy: int, cluster: int) -> None:
        """`occupancy`: how many blocks of a launch a multiprocessor holds at once. `cluster`: blocks of one, or 0."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.blocks = CLUSTERS[cluster] * cluster if cluster else occupancy * processors
        self.sums = torch.empty(0 if cluster else self.blocks * MAX_SUMS, dtype=torch.float32, device=device)
        self.flagged_hidden = torch.zeros(MAX_HEAPS * 16 * 32 // 2, dtype=torch.int64, device=device)
        counters = self.blocks * (self.blocks + 1) + MAX_PARTS * MAX_HEAPS + 4 * MAX_HEAPS + 1
        self.counters = torch.zeros(counters, dtype=torch.int64, device=device)
        self._hidden = [torch.empty(2**20, dtype=torch.float32, device=device)]
        torch.cuda.current_stream(device).synchronize()  # a launch raises counters before it waits for earlier work

    def hidden(self, numbers: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Space for that many float32 numbers, and for bfloat16 hidden values of `shape` (tokens, ranks)."""
        size = numbers + -(-shape[0] * shape[1] // 2)
        if self._hidden[-1].numel() < size:
            self._hidden.append(self._hidden[-1].new_empty(size))
        place = self._hidden[-1]
        return place[:numbers], place[numbers:].view(torch.bfloat16)[: shape[0] * shape[1]].view(shape)


def forget_work_space() -> None:
    """Free the memory. Call it only when no CUDA graph holds its address any more."""
    work_space.cache_clear()


@cache
def work_space(device: torch.device, occupancy: int, cluster: int) -> WorkSpace:
    """The work space that all products on a device share, made by the first. Raises EngineError inside a capture.

    Launches with another number of blocks have one of their own, because they count in other steps.
    """
    if torch.cuda.is_current_stream_capturing():  # a capture would only record that the counters are set to zero
        raise EngineError(
            f"the first product on {device} is captured in a CUDA graph, before its work space is made: call "
            "`gemm.product` once before the capture"
        )
    return WorkSpace(device, occupancy, cluster)
