"""Which tiling of our product is the fastest on a card: what `qerl tune` measures, its file, and who takes it.

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

from qerl import __version__
from qerl.base.errors import ConfigError, EngineError
from qerl.base.files import JSON_BYTES, parse_json, read_text, write_shared
from qerl.formats.cuda import cache_folder, source_texts
from qerl.formats.nvfp4.ways import WRONG

if TYPE_CHECKING:
    import torch

    from qerl.formats.nvfp4.kernel_layout import KernelWeight
    from qerl.formats.nvfp4.lora import Adapter

logger = logging.getLogger(__name__)

CACHE_BYTES = 2**28  # more than the L2 cache of any card holds
REPLAYS = 5
MOST_LAYERS = 1000  # of a tiny model, whose linears an engine finds in the cache as well
CALLS = 32  # the fewest in a graph, so that starting it hardly counts
ROUNDS = 2  # of which the faster counts: while the first runs, the card's clock may still rise
GAIN = 0.02  # share of the default's time that another tiling has to save
KERNELS = "gemm.cu", "portable.cu"  # Hopper's, and that of every card from Ampere on
PART_RANK = 32  # of the adapter in measurements
MEASURE = "measure again with `qerl tune`"

Place = tuple[int, int, int]  # rows, columns and tokens of a product
Fused = tuple[str, tuple[int, ...], int]  # linears that are multiplied by at once: names, rows of each, columns


class Card(NamedTuple):
    name: str  # the driver's
    capability: tuple[int, int]
    processors: int


@dataclass(frozen=True)
class Table:
    """The file of a card. A row of `measured` has a place, microseconds by tiling, and the default and the choice."""

    card: str
    capability: Sequence[int]
    processors: int
    kernel: str  # one of KERNELS
    source: str  # hash of its source
    date: str
    rank: int
    versions: dict[str, str]
    measured: list[dict[str, Any]]

    @property
    def of(self) -> Card:
        return Card(self.card, tuple(self.capability), self.processors)

    def choices(self) -> dict[Place, str]:
        """Raises ValueError, TypeError or KeyError for rows that are not as they are written."""
        for row in self.measured:
            times, sizes = dict(row["us"]), (row["rows"], row["columns"], row["tokens"])
            if not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"rows, columns and tokens are {sizes}")
            for tiling in (row["choice"], row["default"]):
                if type(times.get(tiling)) not in (int, float):
                    raise ValueError(f"{tiling} was not timed")
        return {(row["rows"], row["columns"], row["tokens"]): row["choice"] for row in self.measured}

    def lines(self) -> list[str]:
        """The sizes at which another tiling than the default was chosen."""
        rows = [row for row in self.measured if row["choice"] != row["default"]]
        cells = [(row, row["us"][row["default"]], row["us"][row["choice"]]) for row in rows]
        return [f"{'rows x columns':>15}{'tokens':>8}{'us before':>11}{'us now':>9}{'gain':>6}"] + [
            f"{row['rows']:>7} x {row['columns']:>5}{row['tokens']:>8}{old:>11.2f}{new:>9.2f}{1 - new / old:>6.0%}"
            for row, old, new in cells
        ]

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
        table = Table(**parse_json(read_text(path, JSON_BYTES)))
        if table.kernel not in KERNELS or not isinstance(table.card, str) or table.of.capability < (8, 0):
            raise ValueError(f"it is of {table.kernel} on {table.card}")
        table.choices()
        return table
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
    """What the tilings on a card are."""
    if table is not None:
        return f"those that `qerl tune` measured on {table.date}"
    if capability[0] == 9:
        return "those that were fastest on an H200"
    return "a guess: no card of this kind has been measured (run `qerl tune` on it, and send us its file)"


class Product(NamedTuple):
    """A kernel whose tilings can be measured."""

    source: str
    tiles: Sequence[int]  # numbers of tokens that it is compiled for
    neighbours: Callable[[int, int, int], list[Any]]  # the default tiling for a place, then others
    defines: Callable[[int, Any], tuple[str, ...]]  # macros of (tokens, tiling)
    multiply: Callable[..., torch.Tensor]  # as `portable.product`
    measured: dict[Place, Any]  # what it takes instead of defaults


def product_on(device: torch.device) -> Product | None:
    """The one that `device` runs; None where it runs neither."""
    from qerl.formats.cuda.nvrtc import has_kernels, has_portable_kernels
    from qerl.formats.nvfp4 import gemm, portable, ways

    if has_kernels(device):
        return Product(KERNELS[0], ways.TOKEN_TILES, ways.neighbours, gemm.defines_of, gemm.product, ways.MEASURED)
    own = (lambda tokens, tiling: tiling.defines(), portable.product, portable.MEASURED)
    return Product(KERNELS[1], [*portable.STAGES], portable.neighbours, *own) if has_portable_kernels(device) else None


def card_at(device: torch.device) -> Card:
    import torch

    found = torch.cuda.get_device_properties(device)
    return Card(found.name, (found.major, found.minor), found.multi_processor_count)


def take_(device: torch.device, deterministic: bool) -> None:
    """Take the tilings that were measured on this card, or the defaults; the log says which if there is a file."""
    if (product := product_on(device)) is None:
        return
    product.measured.clear()
    if deterministic:
        return
    card = card_at(device)
    try:
        if (table := table_of(card)) is not None:
            product.measured.update(_tilings(table, product))
            logger.info("tilings of our product are %s", said_of(table, card.capability))
    except ConfigError as error:
        logger.warning("tilings stay the defaults: %s", error)


def _tilings(table: Table, product: Product) -> dict[Place, Any]:
    """The chosen tilings. Raises ConfigError for one that is not among those compared."""
    found = {}
    for place, choice in table.choices().items():
        known = {name_of(each): each for each in product.neighbours(*place)} if place[2] in product.tiles else {}
        if choice not in known:
            raise ConfigError(f"the file of {table.date} has a tiling that is not known, {choice}: {MEASURE}")
        found[place] = known[choice]
    return found


def name_of(tiling: Any) -> str:
    """stages 5, warps 4, ...: what is chosen for a given number of tokens."""
    chosen = {key: value for key, value in asdict(tiling).items() if key not in ("tokens", "architecture")}
    return ", ".join(f"{key} {int(value)}" for key, value in chosen.items())


def tune(linears: Sequence[Fused], device: torch.device) -> tuple[Table, Path]:
    """Measure the tilings of these linears on `device`, and write its file, which keeps what it has of others.

    Raises EngineError on a card that has no kernel of ours, or where no product was right.
    """
    from qerl.base.devices import driver_version
    from qerl.formats.cuda.nvrtc import compile_ahead, stands_in
    from qerl.formats.nvfp4 import gemm, portable

    if stands_in():
        raise EngineError("`qerl tune` measures the card's own kernels: unset QERL_CAPABILITY, which asks for others")
    if (product := product_on(device)) is None:
        raise EngineError(
            "`qerl tune` times our kernels, and there is no card here that runs them: they need one from Ampere on "
            "(compute capability 8.0); `qerl doctor` says what this machine has"
        )
    shapes = {each: (sum(each[1]), each[2], PART_RANK * len(each[1])) for each in linears}
    taken = [each for each, shape in shapes.items() if gemm.takes(*shape) and portable.takes(*shape)]
    places = [(*shapes[each][:2], tokens) for tokens in reversed(product.tiles) for each in taken]
    compile_ahead([(product.source, product.defines(at[2], each)) for at in places for each in product.neighbours(*at)])
    rows = [row for linear in taken for row in measured(product, linear, device)]
    if not rows:
        raise EngineError("our kernels multiply right by none of these linears here: write rollout.kernel: marlin")
    card, kept = card_at(device), []
    with suppress(ConfigError):  # a file that is damaged, or of other kernels, is written anew
        if (earlier := table_of(card)) is not None and _tilings(earlier, product):
            kept = [row for row in earlier.measured if (row["rows"], row["columns"], row["tokens"]) not in places]
    versions = {"qerl": __version__, "torch": version("torch"), "driver": driver_version() or "unknown"}
    about = (product.source, source_hash(product.source), date.today().isoformat(), PART_RANK, versions)
    table, path = Table(*card, *about, kept + rows), table_file(card)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shared(path, (json.dumps(asdict(table), indent=1) + "\n").encode())
    return table, path


def measured(product: Product, linear: Fused, device: torch.device) -> list[dict[str, Any]]:
    """A row of the table for each number of tokens. A tiling that the card refuses or gets wrong is left out."""
    import torch

    from qerl.formats.nvfp4.gemm import reference_product

    name, parts, columns = linear
    rows, found = sum(parts), []
    number = min(cold_layers(rows * columns * 9 // 16), MOST_LAYERS)
    weights = [random_weight(rows, columns, device) for _ in range(number)]
    adapters = [random_adapter(parts, columns, PART_RANK, device) for _ in range(number)]
    x = torch.randn(max(product.tiles), columns, device=device).bfloat16()
    exact, out = reference_product(x, weights[0], None, adapters[0]), x.new_empty(len(x), rows)
    for tokens in product.tiles:
        calls = {}
        for tiling in product.neighbours(rows, columns, tokens):
            fixed = {"x": x[:tokens], "bias": None, "out": out[:tokens], "tiling": tiling}
            pairs = zip(weights, adapters, strict=True)
            each = [partial(product.multiply, weight=weight, adapter=adapter, **fixed) for weight, adapter in pairs]
            if _is_right(each[0], exact[:tokens]):
                calls[name_of(tiling)] = each * -(-CALLS // number)
        rounds = [{tiling: graph_us(of) / len(of) for tiling, of in calls.items()} for _ in range(ROUNDS)]
        us = {tiling: round(min(each[tiling] for each in rounds), 2) for tiling in calls}
        logger.info("%s, %d tokens: %d tilings are right", name, tokens, len(us))
        if us:
            default, fastest = next(iter(us)), min(us, key=us.__getitem__)  # the first that the card can run
            choice = default if us[fastest] > (1 - GAIN) * us[default] else fastest
            row = {"linear": name, "rows": rows, "columns": columns, "tokens": tokens}
            found.append({**row, "us": us, "default": default, "choice": choice})
    return found


def _is_right(call: Callable[[], torch.Tensor], exact: torch.Tensor) -> bool:
    """Whether three products are equal to the bit and as near to the twin's as rounding allows."""
    try:
        first, *others = [call().clone() for _ in range(3)]
    except EngineError:  # no room for its ring or its blocks on this card
        return False
    error = ((first.double() - exact).norm() / exact.norm()).item()
    return error < WRONG and all(bool((first == each).all()) for each in others)


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
