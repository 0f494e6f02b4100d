"""How `gemm.product` divides its work among the blocks of a launch, and which shapes it takes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

UNIT = 64  # columns that a block works on at once
SLAB = 16  # rows of a warp's product
WARPS = 8  # warps of a block that multiply
TOKEN_TILES = (8, 16, 32, 64, 96, 128, 192, 256)  # numbers of tokens that the kernel is compiled for
MAX_TOKENS, MAX_SUMS = 256, 256 * 128  # tokens of a launch, and rows * tokens of a block
MAX_PARTS, MAX_HEAPS = 64, 256  # limits of the tasks that compute hidden values, see gemm.cu
LONG = 8192  # from this many columns on, a task for hidden values takes more of them
ALONE = 116 * 1024  # bytes of shared memory; a multiprocessor has room for only one block of that size


@dataclass(frozen=True)
class Tiling:
    """What the kernel is compiled for, beside the number of tokens."""

    stages: int  # units in a block's ring in shared memory
    batch: int  # loads that a warp has in flight for the adapter's hidden values
    slabs: int = 2  # slabs of 16 rows that a warp works on
    in_loop: bool = False  # of the blocks that share rows, the one with the last range of K adds the adapter's term

    @property
    def rows(self) -> int:
        """Rows of the weight that a block works on at once."""
        return SLAB * WARPS * self.slabs

    def shared_bytes(self, tokens: int) -> int:
        """Shared memory of a block: its ring of units (x, codes, block scales) and the warps' sums of hidden values.

        It is at least ALONE. A launch that starts early finds some multiprocessors still occupied, and would otherwise
        put two of its blocks on one of the others (gate/up of a 7B model, one token: 38 instead of 28 us).
        """
        unit = 2 * UNIT * token_tile(tokens) + self.rows * UNIT * 9 // 16
        return max(ALONE, 1024 + self.stages * unit + WARPS * shrink_tokens(tokens) * 20 * 4)

    def heaps(self, tokens: int, ranks: int) -> int:
        """Pieces of 16 ranks by `shrink_tokens` tokens that the hidden values are divided into."""
        return ranks // 16 * -(-tokens // shrink_tokens(tokens))

    def parts(self, columns: int) -> int:
        """Tasks among which the columns of one such piece are divided."""
        return -(-columns // (32 * WARPS * self.batch))

    def hidden_numbers(self, tokens: int, columns: int, ranks: int) -> int:
        """How many float32 sums the tasks write."""
        return self.heaps(tokens, ranks) * self.parts(columns) * 16 * shrink_tokens(tokens)


def token_tile(tokens: int) -> int:
    """The smallest of TOKEN_TILES that holds this many tokens: a launch computes that many."""
    return next(tile for tile in TOKEN_TILES if tile >= tokens)


def shrink_tokens(tokens: int) -> int:
    """Tokens of one task that computes hidden values."""
    tile = token_tile(tokens)
    return 8 if tile == 8 else 16 if tile <= 64 else 32


def choose_tiling(columns: int, tokens: int) -> Tiling:
    """The tiling that was fastest on an H200.

    A deeper ring delays the other loads. `in_loop` pays off where the loop is long enough for the hidden values to be
    ready before it ends.
    """
    tile, is_long = token_tile(tokens), columns >= LONG
    batch = 6 if is_long and tile > 32 else 3
    stages = {128: 4 if is_long else 5, 192: 5, 256: 4}.get(tile, 6)
    in_loop = tile > 128 or (tile > 32 and is_long)
    return Tiling(stages, batch, slabs=2 if tile <= 128 else 1, in_loop=in_loop)


def fits(rows: int, columns: int, tokens: int, ranks: int = 0) -> bool:
    """Whether `gemm.product` takes this many tokens of this shape, with an adapter of `ranks` over all its parts."""
    if tokens > MAX_TOKENS:
        return False
    tiling = choose_tiling(columns, tokens)
    counted = tiling.parts(columns) < MAX_PARTS and tiling.heaps(tokens, ranks) < MAX_HEAPS
    return columns % 16 == 0 and rows % 8 == 0 and counted
