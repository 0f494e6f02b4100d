"""How a product with few tokens is cut up for the card, and what fits its shared memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

BLOCK = 16  # columns of a tile of the weight
TILE_ROWS = 64
SLOT_BYTES = 36 * BLOCK  # a tile: 64 x 16 codes and 64 block scales
MAX_TOKENS = 64
SHRINK_BATCH = 3  # loads that a warp has under way at once for the adapter
HANDOVER_SLOTS = 16  # numbers of blocks with which launches of one adapter may run
SHARED_LIMIT = 226 * 1024  # bytes a block may have on Hopper, less what is not dynamic


@dataclass(frozen=True)
class Split:
    """Warps of a block over rows and over K, blocks of a cluster over K, and the depth of a warp's ring of copies."""

    cluster: int
    warps_n: int = 4
    warps_k: int = 2
    unroll: int = 4
    stages: int = 4

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    def shared_bytes(self, tokens: int, columns: int) -> int:
        """Of a block: its slice of x and its rings, and in the same place the partial sums, or those of the adapter."""
        padded, blocks = 8 * tiles(tokens), columns // BLOCK
        slice_bytes = padded * (-(-blocks // self.cluster) * 2 * BLOCK + 16)
        rings = self.warps * self.stages * self.unroll * SLOT_BYTES
        sums = self.warps_k * padded * (TILE_ROWS * self.warps_n + 4) * 4
        hidden_sums = min(tiles(tokens), 2) * (self.warps * 640 + 512)
        return max(slice_bytes + rings, sums, hidden_sums)

    def hidden_parts(self, columns: int) -> int:
        """Parts in which the adapter's sum over K is handed over, one a cluster: as many as need one round of loads. A
        second would stand in line behind the weights that all other blocks ask for."""
        return -(-columns // (self.cluster * self.warps * 32 * SHRINK_BATCH))


def tiles(tokens: int) -> int:
    """Tiles of 8 tokens that a launch works on: 1, 2, 4 or 8."""
    return 1 if tokens <= 8 else 1 << (-(-tokens // 8) - 1).bit_length()


def choose_split(rows: int, columns: int, tokens: int) -> Split:
    """The fastest measured on an H200, by how many groups of 256 rows there are to fill its 132 processors."""
    groups = -(-rows // (4 * TILE_ROWS))
    if groups >= 64:
        split = Split(4, 4, 1, 4, 2) if tokens <= 8 else Split(4, 4, 1, 2, 3) if tokens <= 16 else Split(8, 4, 1, 4, 3)
    elif columns >= 8192:
        split = Split(8, 4, 2, 4, 3)
    else:
        split = Split(8, 2, 2, 2, 3) if tokens <= 16 else Split(8, 4, 1, 4, 3)
    cluster = split.cluster
    while cluster > 1 and columns // BLOCK < 4 * cluster:
        cluster //= 2
    return replace(split, cluster=cluster)


def fits(rows: int, columns: int, tokens: int) -> bool:
    """Whether `small_batch.product` takes so many tokens of this shape."""
    return tokens <= MAX_TOKENS and choose_split(rows, columns, tokens).shared_bytes(tokens, columns) <= SHARED_LIMIT


def handover_words(rows: int, columns: int, ranks: int) -> int:
    """8-byte words through which a launch hands over hidden values: counters, then each part's values."""
    sizes = [n for n in (8, 16, 32, MAX_TOKENS) if fits(rows, columns, n)]
    return HANDOVER_SLOTS + max(
        (n * ranks * choose_split(rows, columns, n).hidden_parts(columns) for n in sizes), default=0
    )
