"""How `gemm.product` is cut up for the card, and what it takes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

UNIT = 64  # columns that a block works on at once
SLAB = 16  # rows of a warp's product
WARPS = 8  # of a block, that multiply
TOKEN_TILES = (8, 16, 32, 64, 96, 128, 192, 256)  # tokens that the kernel is compiled for
MAX_TOKENS, MAX_SUMS = 256, 256 * 128  # tokens, and rows * tokens of a block
MAX_PARTS, MAX_HEAPS = 64, 256  # of the tasks that make hidden values, see gemm.cu
LONG = 8192  # columns from which a task takes more of them
ALONE = 116 * 1024  # bytes of shared memory of which a processor has one alone, so that it has one block


@dataclass(frozen=True)
class Tiling:
    """Units in a block's ring, and loads that a warp has under way for the adapter."""

    stages: int
    batch: int
    slabs: int = 2  # of 16 rows, that a warp works on
    in_loop: bool = False  # the adapter's term of shared rows is made by who has their last part, in its loop

    @property
    def rows(self) -> int:
        """Of the weight, that a block works on at once."""
        return SLAB * WARPS * self.slabs

    def shared_bytes(self, tokens: int) -> int:
        """Of a block: its ring of units (x, codes, block scales), and the warps' sums of hidden values.

        At least ALONE: a launch that starts early finds another on some processors, and two of its blocks would go to
        one (gate/up of a 7B, one token: 38 instead of 28 us).
        """
        unit = 2 * UNIT * token_tile(tokens) + self.rows * UNIT * 9 // 16
        return max(ALONE, 1024 + self.stages * unit + WARPS * shrink_tokens(tokens) * 20 * 4)

    def heaps(self, tokens: int, ranks: int) -> int:
        """Pieces of the hidden values, 16 ranks by `shrink_tokens`."""
        return ranks // 16 * -(-tokens // shrink_tokens(tokens))

    def parts(self, columns: int) -> int:
        """Tasks that a piece of the hidden values is made in."""
        return -(-columns // (32 * WARPS * self.batch))

    def hidden_numbers(self, tokens: int, columns: int, ranks: int) -> int:
        """Sums that the tasks leave, float32."""
        return self.heaps(tokens, ranks) * self.parts(columns) * 16 * shrink_tokens(tokens)


def token_tile(tokens: int) -> int:
    """Tokens that a launch works on: the smallest of TOKEN_TILES that holds them."""
    return next(tile for tile in TOKEN_TILES if tile >= tokens)


def shrink_tokens(tokens: int) -> int:
    """Tokens of a task that makes hidden values."""
    tile = token_tile(tokens)
    return 8 if tile == 8 else 16 if tile <= 64 else 32


def choose_tiling(columns: int, tokens: int) -> Tiling:
    """The fastest measured on an H200. A deeper ring delays what else is loaded; the loop has to be long enough that
    hidden values are there before its end."""
    tile, is_long = token_tile(tokens), columns >= LONG
    batch = 6 if is_long and tile > 32 else 3
    stages = {128: 4 if is_long else 5, 192: 5, 256: 4}.get(tile, 6)
    in_loop = tile > 128 or (tile > 32 and is_long)
    return Tiling(stages, batch, slabs=2 if tile <= 128 else 1, in_loop=in_loop)


def fits(rows: int, columns: int, tokens: int, ranks: int = 0) -> bool:
    """Whether `gemm.product` takes so many tokens of this shape, with an adapter of `ranks` over all its parts."""
    if tokens > MAX_TOKENS:
        return False
    tiling = choose_tiling(columns, tokens)
    counted = tiling.parts(columns) < MAX_PARTS and tiling.heaps(tokens, ranks) < MAX_HEAPS
    return columns % 16 == 0 and rows % 8 == 0 and counted
