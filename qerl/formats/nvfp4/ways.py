"""How a product with an NVFP4 weight and its adapter is computed, by shape and number of tokens. No torch.

    fused    base and adapter in one launch of our kernel (`gemm.py`), or in launches of 256 tokens if there are more
    kernel   the GEMM kernel in whose layout the weight is stored (ours, Humming, Marlin), then the adapter
    decoded  the weight decoded into a buffer for cuBLAS, then the adapter

`default_way` decides, from times on an H200 (Humming, Marlin: benchmarks/gemm-7b.json). A way that an engine found
wrong when it opened is not used. A `Tiling` says how our kernel divides its work among the blocks of a launch.
"""

import logging
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

RANK_STEP = 16


def padded_rank(rank: int) -> int:
    """`rank` rounded up to a whole number of steps; the factors of an adapter are padded with zeros."""
    return -(-rank // RANK_STEP) * RANK_STEP


def padded_power(rank: int) -> int:
    """`rank` rounded up to a power of two of at least a step, as the kernels of adapters on experts need it."""
    return max(RANK_STEP, 1 << (rank - 1).bit_length())


UNIT = 64  # columns that a block works on at once
SLAB = 16  # rows of a warp's product
WARPS = 8  # warps of a block that multiply
BLOCK_ROWS = SLAB * WARPS  # of a block whose warps work on one slab
TOKEN_TILES = (8, 16, 32, 64, 96, 128, 192, 256)  # numbers of tokens that the kernel is compiled for
MAX_TOKENS, MAX_SUMS = 256, 256 * 128  # tokens of a launch, and rows * tokens of a block
MAX_PARTS, MAX_HEAPS = 64, 256  # limits of the tasks that compute hidden values, see gemm.cu
FEW_ROWS = 8192  # of q/k/v and o, but not of gate/up
PROCESSORS, LEFT_OVER = 132, 0.75  # of an H200; the share of processors at work below which one slab is too few
MANY_ROWS = BLOCK_ROWS * PROCESSORS + 1  # have more blocks of one slab than there are processors
LONG = 8192  # from this many columns on, a task for hidden values takes more of them
ONE_SLAB_STAGES = {64: 8, 96: 6, 128: 6, 192: 5, 256: 4}  # by token tile: as many as fit, or fewer
# How many clusters an H200 held at once, by their size: its processors are in groups of at most 18, a cluster in one.
CLUSTERS = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
CLUSTERED_FROM = 96  # processors at work from which clusters pay off
# Units of a block up to which they do: with up to 32 tokens; with more; and with more where two blocks share rows, as
# they do without clusters.
FEW_UNITS, MOST_UNITS, PAIR_UNITS = 19, 30, 40
MOST_CLUSTERED = 128  # tokens, for which the sums of a block still fit beside its ring
ALONE = 116 * 1024  # bytes of shared memory; a multiprocessor has room for only one block of that size


@dataclass(frozen=True)
class Tiling:
    """What the kernel is compiled for, beside the number of tokens."""

    stages: int  # units in a block's ring in shared memory
    batch: int  # loads that a warp has in flight for the adapter's hidden values
    slabs: int = 2  # slabs of 16 rows that a warp works on
    in_loop: bool = False  # of the blocks that share rows, the one with the last range of K adds the adapter's term
    cluster: int = 0  # blocks that share rows and exchange sums within their cluster; 0: through memory

    @property
    def rows(self) -> int:
        """Rows of the weight that a block works on at once."""
        return BLOCK_ROWS * self.slabs

    def shared_bytes(self, tokens: int) -> int:
        """Shared memory of a block: its ring of units (x, codes, block scales) and the warps' sums of hidden values.

        It is at least ALONE. A launch that starts early finds some multiprocessors still occupied, and would otherwise
        put two of its blocks on one of the others (gate/up of a 7B model, one token: 38 instead of 28 us).
        """
        unit = 2 * UNIT * token_tile(tokens) + self.rows * UNIT * 9 // 16
        items = self.slabs * token_tile(tokens)  # of 512 bytes, see gemm.cu
        given = self.cluster and self.cluster * -(-items // self.cluster) * 512
        return max(ALONE, 1024 + self.stages * unit + WARPS * shrink_tokens(tokens) * 20 * 4 + given)

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


MEASURED: dict[tuple[int, int, int], Tiling] = {}  # by (rows, columns, token tile); see `tuning.take_`


def choose_tiling(rows: int, columns: int, tokens: int) -> Tiling:
    """The tiling that an engine took from `qerl tune`, or the default."""
    return MEASURED.get((rows, columns, token_tile(tokens))) or default_tiling(rows, columns, tokens)


def default_tiling(rows: int, columns: int, tokens: int) -> Tiling:
    """The tiling that was fastest on an H200."""
    return clustered(rows, columns, tokens) or by_memory(rows, columns, tokens)


def clustered(rows: int, columns: int, tokens: int, in_loop: bool | None = None) -> Tiling | None:
    """The tiling with the largest clusters that fit, if it is faster than sums through memory; else None.

    It saves up to 6 us of a product. But fewer processors are at work, so a long loop over K takes longer. With
    `in_loop` it is that tiling wherever there is one, to be measured.
    """
    tile, blocks = token_tile(tokens), -(-rows // BLOCK_ROWS)
    size = max((size for size, most in CLUSTERS.items() if blocks <= most), default=0)
    if not size or tile > MOST_CLUSTERED or columns < UNIT * size:
        return None
    units = columns / UNIT / size  # of a block
    if in_loop is None:
        most = FEW_UNITS if tile <= 32 else MOST_UNITS if size > 2 else PAIR_UNITS
        if size * blocks < CLUSTERED_FROM or units > most:
            return None
        in_loop = tile > 32 and units >= (24 if columns >= LONG else 12)
    batch = 6 if columns >= LONG and tile > 32 else 3
    stages = 6 if tile < 128 else 3 if in_loop and size > 3 else 4
    return Tiling(stages, batch, slabs=1, in_loop=in_loop, cluster=size)


def by_memory(rows: int, columns: int, tokens: int) -> Tiling:
    """The tiling that was the fastest of those whose blocks exchange sums through memory.

    A deeper ring delays the other loads. `in_loop` pays off where the loop is long enough for the hidden values to be
    ready before it ends. Up to 16,896 rows all are divided along K, or each of the processors has one block of them.
    There one slab is faster, because its blocks exchange half as many sums, unless many processors are left over.
    """
    tile, is_long = token_tile(tokens), columns >= LONG
    one, two = _at_work(rows, 1), _at_work(rows, 2)
    has_few = tile > 32 and one <= PROCESSORS
    one_slab = tile > 128 or (has_few and not is_long and one > LEFT_OVER * two)
    is_deep = is_long or (has_few and not one_slab)
    two_slab_stages = 6 if tile < 128 else 4 if is_deep else 5
    stages = ONE_SLAB_STAGES[tile] if one_slab else two_slab_stages
    batch = 6 if (is_deep and tile > 32) or (tile == 256 and rows > FEW_ROWS) else 3
    return Tiling(stages, batch, slabs=1 if one_slab else 2, in_loop=one_slab or (tile > 32 and is_deep))


def _at_work(rows: int, slabs: int) -> int:
    """Blocks of a launch that have a part of these rows, if each has at most one."""
    blocks = -(-rows // (BLOCK_ROWS * slabs))
    return blocks * max(1, PROCESSORS // blocks)


def neighbours(rows: int, columns: int, tokens: int) -> list[Tiling]:
    """What `qerl tune` compares: the default, those of other shapes, clusters, and rings of a unit more or less."""
    first = default_tiling(rows, columns, tokens)
    others = [by_memory(few, long, tokens) for few in (rows, FEW_ROWS, MANY_ROWS) for long in (columns, UNIT, LONG)]
    others += [each for loop in (False, True) if (each := clustered(rows, columns, tokens, loop))]
    others += [replace(first, stages=first.stages + more) for more in (-1, 1) if first.stages + more > 2]
    return [each for each in dict.fromkeys([first, *others]) if each.parts(columns) < MAX_PARTS]


def fits(rows: int, columns: int, tokens: int, ranks: int = 0) -> bool:
    """Whether `gemm.product` takes this many tokens of this shape, with an adapter of `ranks` over all its parts."""
    if tokens > MAX_TOKENS:
        return False
    tiling = choose_tiling(rows, columns, tokens)
    counted = tiling.parts(columns) < MAX_PARTS and tiling.heaps(tokens, ranks) < MAX_HEAPS
    return columns % 16 == 0 and rows % 8 == 0 and counted


logger = logging.getLogger(__name__)

TOKENS = tuple(1 << power for power in range(12))  # 1 to 2048; others go the way of the next larger one
KERNEL_RIGHT = {"humming": 512, "marlin": 2048}  # the most tokens for which a kernel of vLLM's may be used
# The most for which it was the fastest on an H200; "portable" is ours for other cards (portable.py).
KERNEL_FAST = {"qerl": 512, "portable": 256, "humming": 512, "marlin": 256}
WRONG = 0.015  # relative error from which a product counts as wrong; rounding gives 0.002 to 0.005


@dataclass(frozen=True)
class Shape:
    """A (fused) linear: its weight (rows, columns), its adapter's rank over all parts (0: none), and its kernel."""

    rows: int
    columns: int
    ranks: int
    kernel: str  # "qerl", "portable", "humming" or "marlin"
    fused: bool  # whether the weight is in our kernel's layout, and our kernel takes the adapter's parts

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns} rank {self.ranks} {self.kernel}"

    def fits_fused(self, tokens: int) -> bool:
        """Whether our kernel can multiply by it and its adapter in one launch, or in launches of the most tokens."""
        launched = min(tokens, MAX_TOKENS)  # tokens of the largest launch; if it fits, smaller ones do
        return self.fused and tokens <= KERNEL_FAST[self.kernel] and fits(self.rows, self.columns, launched, self.ranks)

    def default_way(self, tokens: int) -> str:
        if self.fits_fused(tokens):
            return "fused"
        return "kernel" if tokens <= KERNEL_FAST[self.kernel] else "decoded"

    def ways(self, wrong_kernel: Container[int] = (), wrong_fused: Container[int] = ()) -> tuple[str, ...]:
        """The way for each of TOKENS: the default, avoiding those found wrong at that size.

        `wrong_kernel` and `wrong_fused` are the sizes at which those ways gave wrong results.
        """
        ways = []
        for tokens in TOKENS:
            way = self.default_way(tokens)
            if way == "kernel" and tokens in wrong_kernel:
                way = "decoded"
            ways.append("decoded" if way == "fused" and tokens in wrong_fused else way)
        return tuple(ways)


def bucket(tokens: int) -> int:
    """The member of TOKENS that stands for this number."""
    return TOKENS[bisect_left(TOKENS, tokens)]


def unchecked(sizes: Sequence[int]) -> set[int]:
    """The members of TOKENS above all checked sizes: prompts that long run outside graphs, at any length."""
    return {tokens for tokens in TOKENS if tokens > max(sizes, default=0)}


def way_of(ways: Sequence[str], tokens: int) -> str:
    """The way for a call with this many tokens, given the `ways` that `Shape.ways` returned."""
    place = bisect_left(TOKENS, tokens)
    return ways[place] if place < len(TOKENS) else "decoded"


def wrong_sizes(name: str, errors: Mapping[int, float], what: str = "the kernel") -> list[int]:
    """The sizes whose relative error is more than rounding can explain; logs a warning about them."""
    wrong = [size for size, error in errors.items() if not error < WRONG]
    if wrong:
        worst = max(errors.values())
        at = ", ".join(map(str, wrong))
        logger.warning("%s is wrong by %.1f%% for %s at %s tokens: it is not used there", what, 100 * worst, name, at)
    return wrong


def summary(shapes: Mapping[Shape, Sequence[str]]) -> str:
    """One line per shape: up to how many tokens each way is taken."""
    return "\n".join(f"{shape.name}: " + ", ".join(_ends(ways)) for shape, ways in shapes.items())


def _ends(ways: Sequence[str]) -> list[str]:
    following = [*ways[1:], None]
    return [f"{way} to {n}" for way, n, after in zip(ways, TOKENS, following, strict=True) if way != after]
