"""Products with up to 256 tokens on every card from Ampere on, base and adapter in one launch.

What `gemm.py` is on Hopper, by the instructions that all these cards have: see
`qerl/formats/cuda/sources/portable.cu`. The weight lies in the same layout, and `gemm.reference_product` is the twin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qerl.formats.cuda.nvrtc import Launch, Variant, kernel
from qerl.formats.nvfp4 import gemm
from qerl.formats.nvfp4.kernel_layout import KernelWeight
from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.ways import FEW_ROWS, LONG, MAX_HEAPS, MAX_PARTS, SLAB, UNIT

SOURCE, NAME = "portable.cu", "nvfp4_portable"
MAX_SHARED = 99 * 1024  # bytes of shared memory that a block may have on the cards with the least (8.6, 8.9, 12.0)


@dataclass(frozen=True)
class PortableTiling:
    """What the kernel is compiled for."""

    tokens: int  # that a launch computes
    stages: int  # units in a block's ring in shared memory
    warps: int = 8  # that multiply
    slabs: int = 2  # slabs of 16 rows that a warp works on
    split: int = 1  # how many warps share the tokens
    occupancy: int = 1  # blocks of a launch on a multiprocessor
    batch: int = 3  # loads that a warp has in flight for the adapter's hidden values
    beside: bool = True  # one more warp waits for other blocks
    in_loop: bool = False  # of the blocks that share rows, the one with the last range of K adds the adapter's term
    architecture: str = ""  # as for `nvrtc.kernel`

    @property
    def rows(self) -> int:
        """Rows of the weight that a block works on at once."""
        return SLAB * self.warps // self.split * self.slabs

    @property
    def threads(self) -> int:
        return 32 * (self.warps + self.beside)

    @property
    def shrink_tokens(self) -> int:
        """Tokens of one task that computes hidden values."""
        return 8 if self.tokens <= 8 else 16 if self.tokens <= 64 else 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: its ring of units (x, codes, block scales). The sums of hidden values lie in the
        last unit before it is filled."""
        unit = 2 * UNIT * self.tokens + self.rows * UNIT * 9 // 16
        return (self.stages - 1) * unit + max(unit, self.warps * self.shrink_tokens * 20 * 4)

    def heaps(self, tokens: int, ranks: int) -> int:
        """Pieces of 16 ranks by `shrink_tokens` tokens that the hidden values are divided into."""
        return ranks // 16 * -(-tokens // self.shrink_tokens)

    def parts(self, columns: int) -> int:
        """Tasks among which the columns of one such piece are divided."""
        return -(-columns // (32 * self.warps * self.batch))

    def fits(self, rows: int, columns: int, tokens: int, ranks: int) -> bool:
        counted = self.parts(columns) < MAX_PARTS and self.heaps(tokens, ranks) < MAX_HEAPS
        return tokens <= self.tokens and columns % 16 == 0 and rows % 8 == 0 and counted

    def defines(self) -> tuple[str, ...]:
        """The macros that the kernel is compiled with."""
        return (
            f"TOKENS={self.tokens}",
            f"SPLIT={self.split}",
            f"WARPS={self.warps}",
            f"SLABS={self.slabs}",
            f"STAGES={self.stages}",
            f"BATCH={self.batch}",
            f"OCCUPANCY={self.occupancy}",
            f"BESIDE={int(self.beside)}",
            f"IN_LOOP={int(self.in_loop)}",
            f"MAX_PARTS={MAX_PARTS}",
            f"MAX_HEAPS={MAX_HEAPS}",
        )


# By the numbers of tokens that the kernel is compiled for.
STAGES = {8: 7, 16: 5, 32: 5, 48: 4, 64: 3, 96: 3, 128: 3, 192: 3, 256: 2}


MEASURED: dict[tuple[int, int, int], PortableTiling] = {}  # by (rows, columns, size); see `tuning.take_`


def choose_tiling(rows: int, columns: int, tokens: int) -> PortableTiling:
    """The tiling that an engine took from `qerl tune`, or the default."""
    size = next(size for size in STAGES if size >= tokens)
    return MEASURED.get((rows, columns, size)) or default_tiling(rows, columns, tokens)


def default_tiling(rows: int, columns: int, tokens: int) -> PortableTiling:
    """The tiling that was fastest on an H200, which ran the code of compute capability 8.0; for other cards a guess.

    Up to 64 tokens two small blocks on a multiprocessor hide each other's waits. For more, one warp needs the registers
    of two. Of few rows all are divided along K, and smaller blocks of rows exchange half as many sums.
    """
    size, is_long = next(size for size in STAGES if size >= tokens), columns >= LONG
    if size <= 64:
        in_loop = size == 64 and not is_long
        return PortableTiling(size, STAGES[size], warps=4, occupancy=2, batch=5 if is_long else 3, in_loop=in_loop)
    if size in (96, 128) and rows <= FEW_ROWS and not is_long:
        return PortableTiling(size, stages=4, split=2, in_loop=True)
    return PortableTiling(size, STAGES[size], split=1 if size <= 128 else 2, beside=False, in_loop=True)


def neighbours(rows: int, columns: int, tokens: int) -> list[PortableTiling]:
    """What `qerl tune` compares: the default, those of other shapes, and the default with one thing changed.

    A ring that is too large for the card's shared memory is among them: the driver refuses it.
    """
    first = default_tiling(rows, columns, tokens)
    others = [default_tiling(few, long, tokens) for few in (FEW_ROWS, FEW_ROWS + 1) for long in (UNIT, LONG)]
    others += [replace(first, in_loop=not first.in_loop), replace(first, beside=not first.beside)]
    others += [replace(first, batch=5 if first.batch == 3 else 3)]
    others += [replace(first, stages=first.stages + more) for more in (-1, 1, 2)]
    if first.occupancy > 1:
        others.append(replace(first, warps=8, occupancy=1))
    return [each for each in dict.fromkeys([first, *others]) if each.stages > 1 and each.parts(columns) < MAX_PARTS]


def product(
    x: torch.Tensor,
    weight: KernelWeight,
    bias: torch.Tensor | None = None,
    adapter: Adapter | None = None,
    out: torch.Tensor | None = None,
    tiling: PortableTiling | None = None,
) -> torch.Tensor:
    """x W^T + bias + (x A^T) B^T: (tokens, in) -> (tokens, out), bfloat16, for up to 256 tokens.

    `out` is a contiguous tensor to write into, and `tiling` is for measurements. Two products on a device must not
    overlap, because they share work space. Raises ValueError for an input, a weight or an adapter that the kernel does
    not take, EngineError if the first call on a device is being captured.
    """
    tokens, columns = x.shape
    rows, ranks = weight.out_features, 0 if adapter is None else adapter.a.shape[0]
    gemm.check(x, weight, adapter)
    tiling = choose_tiling(rows, columns, tokens) if tiling is None else tiling
    if not tiling.fits(rows, columns, tokens, ranks):
        raise ValueError(f"{tokens} tokens of a weight ({rows}, {columns}) with {ranks} ranks do not fit {tiling}")
    space = gemm.work_space(x.device, tiling.occupancy, 0)
    numbers = tiling.heaps(tokens, ranks) * tiling.parts(columns) * 16 * tiling.shrink_tokens
    parts, hidden = space.hidden(numbers, (tokens, ranks))
    out = x.new_empty(tokens, rows) if out is None else out
    adapter_numbers = (0, 1, 0, 0) if adapter is None else (ranks, adapter.part_rank, *adapter.part_ends)
    kernel(SOURCE, NAME, tiling.defines(), tiling.architecture)(
        Launch((space.blocks, 1, 1), tiling.threads, tiling.shared_bytes, together=tiling.occupancy),
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
        float(weight.alpha * gemm.CODE_FACTOR),
        *adapter_numbers,
    )
    return out


def takes(rows: int, columns: int, ranks: int = 0) -> bool:
    """Whether `product` takes a weight of this shape for any number of tokens up to 256."""
    return all(choose_tiling(rows, columns, size).fits(rows, columns, size, ranks) for size in STAGES)


def variants(columns: int) -> list[Variant]:
    """What has to be compiled for weights of this many columns, for all numbers of tokens; the slowest come first."""
    measured = {rows for rows, of, _ in MEASURED if of == columns}
    sizes = [(rows, tokens) for tokens in reversed(STAGES) for rows in (FEW_ROWS, FEW_ROWS + 1, *measured)]
    return [(SOURCE, each) for each in dict.fromkeys(choose_tiling(rows, columns, n).defines() for rows, n in sizes)]
