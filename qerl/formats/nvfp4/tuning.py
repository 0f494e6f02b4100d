"""Which tiling of our product is the fastest on a card: what `qerl tune` measures, the file of it, and who takes it.

The file is kept beside the compiled kernels. An engine takes its choices when it opens, unless it is deterministic,
because tilings add in different orders. A file of another card, of other kernels, or with a tiling that is not among
`neighbours` is refused. Importing this loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl.base.errors import ConfigError, EngineError
from qerl.base.files import JSON_BYTES, parse_json, read_text, write_shared
from qerl.formats.cuda import cache_folder, source_texts
from qerl.formats.nvfp4.ways import WRONG

if TYPE_CHECKING:
    import torch
    from rich.table import Table as RichTable

    from qerl.formats.nvfp4.kernel_layout import KernelWeight
    from qerl.formats.nvfp4.lora import Adapter

logger = logging.getLogger(__name__)

CACHE_BYTES = 2**28  # more than the L2 cache of any card holds
REPLAYS = 5
CALLS = 32  # the fewest in a graph, so that starting it hardly counts
ROUNDS = 2  # of which the faster counts: while the first runs, the card's clock may still rise
GAIN = 0.02  # share of the default's time that another tiling has to save
KERNELS = "gemm.cu", "portable.cu"  # Hopper's, and that of every card from Ampere on
PART_RANK = 32  # of the adapter in measurements
MEASURE = "measure again with `qerl tune`"


class Card(NamedTuple):
    """What a measurement is of: a driver's name, compute capability, and multiprocessors."""

    name: str
    capability: tuple[int, int]
    processors: int


class Fused(NamedTuple):
    """Linears that an engine multiplies by at once: their names, the rows of each, and their columns."""

    name: str
    parts: tuple[int, ...]
    columns: int


@dataclass(frozen=True)
class Table:
    """The file of a card. `measured` has, for each (rows, columns, tokens), microseconds by tiling, and two of these:
    the default and the choice."""

    card: str
    capability: Sequence[int]
    processors: int
    kernel: str  # one of KERNELS
    source: str  # hash of the source
    date: str
    rank: int
    versions: dict[str, str]
    measured: list[dict[str, Any]]

    def __post_init__(self) -> None:
        """Raise ValueError, TypeError or KeyError for what is not as it is written."""
        if self.kernel not in KERNELS:
            raise ValueError(f"its kernel is {self.kernel}")
        if not all(isinstance(text, str) for text in (self.card, self.source, self.date)):
            raise TypeError("its card, source or date is not a text")
        for row in self.measured:
            sizes = [row["rows"], row["columns"], row["tokens"]]
            if not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"rows, columns and tokens are {sizes}")
            if not all(type(us) in (int, float) for us in dict(row["us"]).values()):
                raise ValueError("its times are not numbers")
            if row["choice"] not in row["us"]:
                raise ValueError(f"{row['choice']} was not timed")
        tuple(self.capability)

    @property
    def of(self) -> Card:
        return Card(self.card, tuple(self.capability), self.processors)

    def shown(self) -> RichTable:
        """For a terminal: microseconds before and after, where another tiling than the default was chosen."""
        from rich.table import Table

        shown = Table("rows x columns", "tokens", "us before", "us now", "gain", box=None)
        for row in self.measured:
            before, now = row["us"].get(row["default"]), row["us"][row["choice"]]
            if row["choice"] != row["default"]:
                gain = "was wrong" if before is None else f"{100 * (1 - now / before):.0f}%"
                shown.add_row(f"{row['rows']} x {row['columns']}", f"{row['tokens']}", f"{before}", f"{now}", gain)
        same = sum(row["choice"] == row["default"] for row in self.measured)
        shown.caption = f"{same} of {len(self.measured)} sizes keep the default, within {GAIN:.0%} of the fastest"
        return shown

    @property
    def is_current(self) -> bool:
        """Whether the kernel's source is still the same."""
        return self.source == source_hash(self.kernel)


def table_file(card: Card) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", card.name.lower()).strip("-")
    return cache_folder() / f"tilings-{name}-{card.processors}.json"


def read_table(path: Path) -> Table:
    """Raises ConfigError for what `qerl tune` did not write."""
    try:
        return Table(**parse_json(read_text(path, JSON_BYTES)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a file of `qerl tune` ({error}): delete it, or {MEASURE}") from error


def table_of(card: Card) -> Table | None:
    """What was measured on such a card; None if nothing was. Raises ConfigError for a file that cannot be used."""
    path = table_file(card)
    if not path.exists():
        return None
    table = read_table(path)
    if table.of != card:
        raise ConfigError(f"{path} is of {table.of}, and this is {card}: delete it, or {MEASURE}")
    if not table.is_current:
        raise ConfigError(f"{path} is of other kernels than those of this qerl, from {table.date}: {MEASURE}")
    return table


def tables() -> list[Table]:
    """What was measured by these kernels, on any card; damaged files are left out."""
    found = []
    for path in sorted(cache_folder().glob("tilings-*.json")):
        with suppress(ConfigError):
            found.append(read_table(path))
    return [table for table in found if table.is_current]


def source_hash(source: str) -> str:
    return hashlib.sha256(repr(source_texts(source)).encode()).hexdigest()[:16]


def said_of(table: Table | None, capability: tuple[int, int]) -> str:
    """Where the tilings on a card come from, for `qerl doctor` and `qerl plan`."""
    if table is not None:
        return f"those that `qerl tune` measured on {table.date}"
    if capability[0] == 9:
        return "those that were fastest on an H200"
    return "a guess: no card of this kind has been measured (run `qerl tune` on it, and send us its file)"


class Product(NamedTuple):
    """A kernel whose tilings can be measured."""

    source: str
    tiles: tuple[int, ...]  # numbers of tokens that it is compiled for
    neighbours: Callable[[int, int, int], list[Any]]  # (rows, columns, tokens) -> the default tiling, then others
    defines: Callable[[int, Any], tuple[str, ...]]  # macros of (tokens, tiling)
    multiply: Callable[..., torch.Tensor]  # as `portable.product`
    measured: dict[tuple[int, int, int], Any]  # what it takes instead of defaults


def products() -> tuple[Product, Product]:
    """Those of KERNELS."""
    from qerl.formats.nvfp4 import gemm, portable, ways

    sizes, defines = tuple(portable.STAGES), portable.PortableTiling.defines
    hopper = (ways.TOKEN_TILES, ways.neighbours, gemm.defines_of, gemm.product, ways.MEASURED)
    ampere = (sizes, portable.neighbours, lambda tokens, tiling: defines(tiling), portable.product, portable.MEASURED)
    return Product(KERNELS[0], *hopper), Product(KERNELS[1], *ampere)


def product_on(device: torch.device) -> Product | None:
    """The one that `device` runs; None where it runs neither."""
    from qerl.formats.cuda.nvrtc import has_kernels, has_portable_kernels

    hopper, ampere = products()
    return hopper if has_kernels(device) else ampere if has_portable_kernels(device) else None


def card_at(device: torch.device) -> Card:
    import torch

    found = torch.cuda.get_device_properties(device)
    return Card(found.name, (found.major, found.minor), found.multi_processor_count)


def take_(device: torch.device, deterministic: bool) -> None:
    """Take the tilings that were measured on this card, or the defaults; the log says which if there is a file."""
    for each in products():
        each.measured.clear()
    product = product_on(device)
    if deterministic or product is None:
        return
    card = card_at(device)
    try:
        if (table := table_of(card)) is None:
            return
        product.measured.update(_choices(table, product))
    except ConfigError as error:
        logger.warning("tilings stay the defaults: %s", error)
    else:
        logger.info("%d tilings of our product are %s", len(product.measured), said_of(table, card.capability))


def _choices(table: Table, product: Product) -> dict[tuple[int, int, int], Any]:
    """The chosen tilings by (rows, columns, tokens). Raises ConfigError for one that is not among those compared."""
    found = {}
    for row in table.measured:
        place = row["rows"], row["columns"], row["tokens"]
        known = {name_of(each): each for each in product.neighbours(*place)} if place[2] in product.tiles else {}
        if row["choice"] not in known:
            raise ConfigError(f"the file of {table.date} has a tiling that is not known, {row['choice']}: {MEASURE}")
        found[place] = known[row["choice"]]
    return found


def name_of(tiling: Any) -> str:
    """stages 5, warps 4, ...: what is chosen for a given number of tokens."""
    return ", ".join(f"{key} {int(value)}" for key, value in asdict(tiling).items() if key not in UNCHOSEN)


UNCHOSEN = ("tokens", "architecture")


def tune(linears: Sequence[Fused], device: torch.device) -> tuple[Table, Path]:
    """Measure the tilings of these linears on `device`, and write its file, which keeps what it has of others.

    Raises EngineError on a card that has no kernel of ours, or where no product was right.
    """
    from qerl.base.devices import driver_version
    from qerl.formats.cuda.nvrtc import compile_ahead

    if (product := product_on(device)) is None:
        raise EngineError(
            "`qerl tune` times our kernels, and there is no card here that runs them: they need one from Ampere on "
            "(compute capability 8.0); `qerl doctor` says what this machine has"
        )
    linears = [each for each in linears if _takes(sum(each.parts), each.columns, PART_RANK * len(each.parts))]
    shapes = [(sum(each.parts), each.columns, tokens) for tokens in reversed(product.tiles) for each in linears]
    variants = [(product.source, product.defines(at[2], each)) for at in shapes for each in product.neighbours(*at)]
    compile_ahead(dict.fromkeys(variants))
    rows = [row for linear in linears for row in measured(product, linear, device)]
    if not rows:
        raise EngineError("our kernels multiply right by none of these linears here: write rollout.kernel: marlin")
    card = card_at(device)
    try:
        if (earlier := table_of(card)) is not None:
            _choices(earlier, product)
        kept = [] if earlier is None else earlier.measured
    except ConfigError:  # damaged, or of other kernels: it is written anew
        kept = []
    kept = [row for row in kept if (row["rows"], row["columns"], row["tokens"]) not in shapes]
    versions = {"qerl": version("qerl"), "torch": version("torch"), "driver": driver_version() or "unknown"}
    about = (product.source, source_hash(product.source), date.today().isoformat(), PART_RANK, versions)
    table, path = Table(*card, *about, kept + rows), table_file(card)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shared(path, (json.dumps(asdict(table), indent=1) + "\n").encode())
    return table, path


def _takes(*shape: int) -> bool:
    """As `opening.check_folder` asks before an engine takes our kernel."""
    from qerl.formats.nvfp4 import gemm, portable

    return gemm.takes(*shape) and portable.takes(*shape)


def measured(product: Product, linear: Fused, device: torch.device) -> list[dict[str, Any]]:
    """A row of the table for each number of tokens. A tiling that the card refuses or gets wrong is left out."""
    import torch

    from qerl.formats.nvfp4.gemm import reference_product

    rows, columns = sum(linear.parts), linear.columns
    number = cold_layers(rows * columns * 9 // 16)
    weights = [random_weight(rows, columns, device) for _ in range(number)]
    adapters = [random_adapter(linear.parts, columns, PART_RANK, device) for _ in range(number)]
    x = torch.randn(max(product.tiles), columns, device=device).bfloat16()
    exact, out, found = reference_product(x, weights[0], None, adapters[0]), x.new_empty(len(x), rows), []
    for tokens in product.tiles:
        place = (rows, columns, tokens)
        calls = {
            tiling: [
                partial(product.multiply, x[:tokens], weight, None, adapter, out[:tokens], tiling)
                for weight, adapter in zip(weights, adapters, strict=True)
            ]
            for tiling in product.neighbours(*place)
        }
        calls = {name_of(tiling): of for tiling, of in calls.items() if _is_right(of[0], exact[:tokens], tiling)}
        calls = {name: of * -(-CALLS // number) for name, of in calls.items()}
        rounds = [{name: graph_us(of) / len(of) for name, of in calls.items()} for _ in range(ROUNDS)]
        us = {name: round(min(each[name] for each in rounds), 2) for name in calls}
        if us:
            default = name_of(product.neighbours(*place)[0])
            fastest = min(us, key=us.__getitem__)
            choice = default if us[fastest] > (1 - GAIN) * us.get(default, float("inf")) else fastest
            sizes = {"linear": linear.name, **dict(zip(("rows", "columns", "tokens"), place, strict=True))}
            found.append({**sizes, "us": us, "default": default, "choice": choice})
        logger.info("%s, %d tokens: %d tilings are right", linear.name, tokens, len(us))
    return found


def _is_right(call: Callable[[], torch.Tensor], exact: torch.Tensor, tiling: Any) -> bool:
    """Whether three products are equal to the bit and as near to the twin's as rounding allows."""
    try:
        outs = [call().clone() for _ in range(3)]
    except EngineError as error:  # no room for its ring or its blocks on this card
        logger.debug("%s: %s", tiling, error)
        return False
    error = ((outs[0].double() - exact).norm() / exact.norm()).item()
    return error < WRONG and all(bool((outs[0] == each).all()) for each in outs[1:])


def cold_layers(layer_bytes: int) -> int:
    """How many layers have to take turns so that none finds its own weights in the cache."""
    return 1 + CACHE_BYTES // layer_bytes


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds that all calls take one after another in a CUDA graph: the median of REPLAYS replays."""
    import torch

    calls[0]()  # compiles and loads, which must not happen during the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[REPLAYS // 2]


def random_weight(rows: int, columns: int, device: torch.device | str) -> KernelWeight:
    """Random words, of which any make a weight, with scales from 32 to 448 as a normal weight of std 0.02 has them."""
    import torch

    from qerl.formats.nvfp4 import slab_layout
    from qerl.formats.nvfp4.kernel_layout import QERL, KernelWeight
    from qerl.formats.nvfp4.layout import BLOCK

    blocks = (-(-rows // slab_layout.ROWS), -(-columns // slab_layout.UNIT))
    numbers = slab_layout.ROWS * slab_layout.UNIT
    words = torch.randint(-(2**31), 2**31 - 1, (*blocks, numbers // 8), dtype=torch.int32, device=device)
    scales = torch.randint(120, 151, (*blocks, numbers // BLOCK), dtype=torch.uint8, device=device)
    return KernelWeight(QERL, words, scales, rows, columns, global_scale=3e4)


def random_adapter(parts: Sequence[int], columns: int, part_rank: int, device: torch.device | str) -> Adapter:
    """An adapter whose product is about as large as that of `random_weight`."""
    import torch

    from qerl.formats.nvfp4.lora import Adapter

    ranks, start = part_rank * len(parts), 0
    a = torch.randn(ranks, columns, device=device).mul_(columns**-0.5).bfloat16()
    b = torch.zeros(sum(parts), ranks, device=device, dtype=torch.bfloat16)
    for index, rows in enumerate(parts):
        b[start : start + rows, part_rank * index : part_rank * (index + 1)].normal_(0, 0.2)
        start += rows
    return Adapter(a, b, tuple(parts))
