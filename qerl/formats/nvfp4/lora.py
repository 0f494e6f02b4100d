"""The adapter of a linear in the form the kernels take, and its product beside a base product of another kernel.

On Hopper it takes two launches: hidden = x A^T, rounded to bfloat16 (`shrink`), then out += hidden B^T
(`kernels.expand_`). The twin is `reference_add`. Our own kernel, `gemm.product`, does base and adapter in a single
launch instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from qerl.formats.cuda.nvrtc import Launch, Variant, has_kernels, kernel
from qerl.formats.nvfp4.ways import RANK_STEP

COLUMN_STEP = 8  # columns that a lane loads at once: 16 bytes
LONG = 8192  # from this many columns on, more blocks share a sum


@dataclass(frozen=True)
class Adapter:
    """The adapter of a linear whose fused parts all have the same rank.

    `a` (ranks, in) stacks the A of the parts, `b` (out, ranks) is block-diagonal with their B. Both are bfloat16 and
    contiguous.
    """

    a: torch.Tensor
    b: torch.Tensor
    part_rows: tuple[int, ...]

    @property
    def part_rank(self) -> int:
        return self.a.shape[0] // len(self.part_rows)

    @property
    def part_ends(self) -> tuple[int, int]:
        """The rows at which the first and the second part end."""
        first, second = (*self.part_rows, 0)[:2]
        return first, first + second

    @property
    def fits_kernels(self) -> bool:
        """Whether the CUDA kernels take it: at most 3 parts, padded ranks, and rows of A aligned to 16 bytes."""
        (ranks, columns), parts = self.a.shape, len(self.part_rows)
        return parts <= 3 and ranks % (RANK_STEP * parts) == 0 and columns % COLUMN_STEP == 0


def add_adapter_(out: torch.Tensor, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """out (tokens, rows) += (x A^T) B^T in place, for x (tokens, in), by our kernels if they pay off, else cuBLAS."""
    if kernels_pay(*x.shape) and adapter.fits_kernels and has_kernels(x.device):
        return add_(out, x, adapter)
    return out.addmm_(torch.mm(x, adapter.a.t()), adapter.b.t())


def product_with_adapter(
    product: Callable[[], torch.Tensor], x: torch.Tensor, adapter: Adapter, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """product() + bias + (x A^T) B^T (tokens, rows), for x (tokens, in); `product` gives x W^T on the current stream.

    The same as `add_adapter_`, but x A^T is computed on a second stream, beside the product: for few tokens it takes a
    third as long as the product and leaves most of the card idle. A CUDA graph keeps both branches.
    """
    if not (kernels_pay(*x.shape) and adapter.fits_kernels and has_kernels(x.device)):
        out = product()
        return add_adapter_(out if bias is None else out.add_(bias), x, adapter)
    from qerl.formats.nvfp4.kernels import expand_

    main, second = torch.cuda.current_stream(x.device), _second_stream(x.device)
    hidden = x.new_empty(len(x), len(adapter.a))  # of the current stream, on which it is given back
    second.wait_stream(main)
    with torch.cuda.stream(second):
        shrink(x, adapter.a, hidden)
    out = product()
    main.wait_stream(second)
    return expand_(out, hidden, adapter, bias)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def kernels_pay(tokens: int, columns: int) -> bool:
    """Whether `add_` is faster than two cuBLAS products, as measured on an H200 with 7B shapes and rank 32.

    For example, with 18944 columns `add_` takes 11.8 us against 9.2 at 128 tokens, and 7.4 against 9.2 at 64.
    """
    return tokens <= (96 if columns >= LONG else 512)


def add_(out: torch.Tensor, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """out (tokens, rows) += (x A^T) B^T in place, for x (tokens, in); all bfloat16 and contiguous."""
    from qerl.formats.nvfp4.kernels import expand_

    return expand_(out, shrink(x, adapter.a), adapter)


def shrink(x: torch.Tensor, lora_a: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """x A^T in bfloat16: (tokens, in), (ranks, in) -> (tokens, ranks), written into `hidden` if it is given."""
    tokens, columns = x.shape
    ranks = lora_a.shape[0]
    tiles, warps, cluster = _tiles(tokens), _warps(columns), 8 if columns >= LONG else 4
    hidden = x.new_empty(tokens, ranks) if hidden is None else hidden
    launch = Launch((ranks // RANK_STEP, cluster, -(-tokens // (8 * tiles))), 32 * warps, cluster=(1, cluster, 1))
    kernel("shrink.cu", "lora_shrink", _defines(tiles, warps))(launch, x, lora_a, hidden, tokens, columns, ranks)
    return hidden


def variants(columns: int) -> list[Variant]:
    """What has to be compiled for `shrink` with this many columns, for any number of tokens."""
    return [("shrink.cu", _defines(tiles, _warps(columns))) for tiles in (1, 2)]


def _tiles(tokens: int) -> int:
    """Tiles of 8 tokens that a block works on."""
    return 1 if tokens <= 8 else 2


def _warps(columns: int) -> int:
    return 16 if columns >= LONG else 8


def _defines(tiles: int, warps: int) -> tuple[str, ...]:
    return f"TILES={tiles}", f"WARPS={warps}", "BATCH=5"


def reference_add(out: torch.Tensor, x: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """The same as `add_` in plain torch and float64, but not in place."""
    hidden = (x.double() @ adapter.a.double().t()).to(torch.bfloat16)
    return out.double() + hidden.double() @ adapter.b.double().t()
