"""Our product kernels without a card: the twin against plain products, sizes, and refusals."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.formats.cuda import nvrtc
from qerl.formats.cuda.nvrtc import has_kernels
from qerl.formats.nvfp4 import decode, gemm, lora, slab_layout, ways
from qerl.formats.nvfp4.decode import WARP_COLUMNS, WARP_ROWS, decode_, dequantize_by_twin_, reference_decoded
from qerl.formats.nvfp4.kernel_layout import HUMMING_WGMMA, MARLIN, QERL, KernelWeight, dequantize
from qerl.formats.nvfp4.lora import Adapter
from qerl.formats.nvfp4.tuning import name_of
from tests.helpers.gemm_cases import IN_ALL_LAYOUTS, error, random_adapter, random_weight

pytestmark = pytest.mark.usefixtures("fresh_seed")


@IN_ALL_LAYOUTS
def test_the_twin_is_the_product_with_the_decoded_weight(layout):
    weight = random_weight(192, 96, layout)
    x, bias = torch.randn(5, 96).bfloat16(), torch.randn(192).bfloat16()
    plain = x.double() @ dequantize(weight, torch.float32).double().t() + bias.double()
    assert error(gemm.reference_product(x, weight, bias), plain) < 1e-6


@pytest.mark.parametrize(("start", "count"), [(0, 600), (0, 256), (255, 2), (37, 480), (599, 1)])
def test_rows_are_dequantized_a_block_at_a_time(start, count):
    weight = random_weight(600, 176)
    scaled = dequantize_by_twin_(torch.empty(count, 176, dtype=torch.bfloat16), weight, start, True)
    assert torch.equal(scaled, dequantize(weight, torch.bfloat16)[start : start + count])
    plain = dequantize_by_twin_(torch.empty(count, 176), weight, start, False)
    assert torch.equal(plain, reference_decoded(weight)[start : start + count])


def test_the_adapter_of_the_twin_rounds_its_hidden_values_once():
    weight, x = random_weight(64, 96), torch.randn(3, 96).bfloat16()
    adapter = random_adapter(64, 96, 16, (64,))
    hidden = (x.double() @ adapter.a.double().t()).bfloat16().double()
    difference = gemm.reference_product(x, weight, None, adapter) - gemm.reference_product(x, weight)
    torch.testing.assert_close(difference, hidden @ adapter.b.double().t(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("parts", "rank", "columns", "fits"),
    [
        ((64,), 16, 32, True),
        ((64, 8, 8), 32, 32, True),
        ((64, 8), 24, 32, False),
        ((16,) * 4, 16, 32, False),
        ((64,), 16, 40, True),
        ((64,), 16, 36, False),  # rows do not begin at a multiple of 16 bytes
    ],
)
def test_which_adapters_the_kernels_support(parts, rank, columns, fits):
    assert random_adapter(sum(parts), columns, rank, parts).fits_kernels is fits


X = torch.zeros(4, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "what", "layout", "adapter"),
    [
        (torch.zeros(257, 128, dtype=torch.bfloat16), "257 tokens", QERL, None),
        (torch.zeros(4, 192, dtype=torch.bfloat16), r"\(4, 192\)", QERL, None),
        (X.float(), "float32", QERL, None),
        (torch.zeros(128, 4, dtype=torch.bfloat16).t(), "not contiguous", QERL, None),
        (X, "as humming keeps it", HUMMING_WGMMA, None),
        (X, "as marlin keeps it", MARLIN, None),
        (X, "no adapter of parts", QERL, (24, (64,))),
        (X, "no adapter of parts", QERL, (16, (16,) * 4)),
    ],
)
def test_what_the_kernel_would_misread_is_refused(x, what, layout, adapter):
    adapter = adapter and random_adapter(64, 128, *adapter)
    with pytest.raises(ValueError, match=what):
        gemm.product(x, random_weight(64, 128, layout), None, adapter)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256])
@pytest.mark.parametrize("columns", [64, 880, 896, 3584, 8192, 18944, 29568])
@pytest.mark.parametrize("rows", [1536, 2048, 2560, 3584, 4608, 7168, 37888])
def test_a_tiling_fits_the_card_and_its_counters(rows, tokens, columns):
    """Hopper has 227 KiB of shared memory per block; fused q/k/v of rank 128 have the most hidden values."""
    chosen = ways.choose_tiling(rows, columns, tokens)
    assert ways.fits(rows, columns, tokens)
    assert chosen.shared_bytes(tokens) <= 226 * 1024
    assert chosen.stages >= 3
    assert chosen.rows * ways.token_tile(tokens) <= ways.MAX_SUMS
    assert chosen.heaps(tokens, 3 * 128) < ways.MAX_HEAPS
    assert chosen.parts(columns) < ways.MAX_PARTS
    assert chosen.parts(columns) * 32 * ways.WARPS * chosen.batch >= columns
    smaller = [tile for tile in ways.TOKEN_TILES if tile < ways.token_tile(tokens)]
    assert ways.token_tile(tokens) >= tokens > max(smaller, default=0)


@pytest.mark.parametrize(
    ("rows", "columns", "sizes"),
    [
        (3584, 3584, {8: 4, 32: 4, 128: 4, 192: 0}),  # o of a 7B
        (4608, 3584, {8: 3, 128: 3}),
        (3584, 18944, {8: 0, 128: 0}),  # its loop over K is long, so all processors are needed
        (1536, 8960, {8: 8, 128: 8}),
        (2048, 11008, {32: 0, 64: 6}),
        (5120, 5120, {32: 0, 128: 0}),  # three times its 40 blocks of rows do not fit
        (3072, 8192, {8: 0, 64: 0}),  # 32 units a block: in between, and not measured
        (6144, 4096, {32: 0, 64: 2}),
        (1536, 256, {8: 0}),  # fewer units than blocks
    ],
)
def test_blocks_are_clusters_where_that_was_faster_and_no_more_than_a_card_holds(rows, columns, sizes):
    for tokens, size in sizes.items():
        assert ways.default_tiling(rows, columns, tokens).cluster == size
        if size:
            assert -(-rows // ways.BLOCK_ROWS) <= ways.CLUSTERS[size]


def test_a_card_that_holds_fewer_clusters_takes_no_clusters(loaded, monkeypatch):
    """Blocks that wait for others which are not there would wait forever."""
    monkeypatch.setattr(gemm, "holds_clusters", lambda tokens, tiling: False)
    words, scales = torch.empty(1, dtype=torch.int32), torch.empty(1, dtype=torch.uint8)
    weight = KernelWeight(QERL, words, scales, 3584, 3584, global_scale=1000.0)
    x = torch.empty(32, 3584, dtype=torch.bfloat16)
    gemm.product(x, weight)
    assert loaded == {("gemm.cu", gemm.defines_of(32, ways.by_memory(3584, 3584, 32)))}
    with pytest.raises(EngineError, match="does not hold 30 clusters of 4 blocks at once"):
        gemm.product(x, weight, tiling=ways.default_tiling(3584, 3584, 32))
    with pytest.raises(ValueError, match="3584 rows need more than 15 clusters of 8 blocks"):
        gemm.product(x, weight, tiling=ways.Tiling(6, 3, slabs=1, cluster=8))


def test_sources_and_layout_agree_on_sizes():
    source = (nvrtc.FOLDER / "gemm.cu").read_text(encoding="utf-8")
    assert int(re.search(r"#define UNIT (\d+)", source)[1]) == ways.UNIT == slab_layout.UNIT
    assert int(re.search(r"#define LAID_ROWS (\d+)", source)[1]) == slab_layout.ROWS
    assert 4 * int(re.search(r"#define GROUPS (\d+)", source)[1]) == ways.WARPS
    decoding = (nvrtc.FOLDER / "decode_slabs.cu").read_text(encoding="utf-8")
    sizes = {name: int(re.search(rf"#define {name} (\d+)", decoding)[1]) for name in ("LAID_SLABS", "SLABS", "UNITS")}
    assert sizes["LAID_SLABS"] * slab_layout.SLAB == slab_layout.ROWS
    assert (16 * sizes["SLABS"], 64 * sizes["UNITS"]) == (WARP_ROWS, WARP_COLUMNS)
    sizes = [(rows, tokens) for rows in (8192, 10240, 12288, 37888) for tokens in ways.TOKEN_TILES]
    assert all(slab_layout.ROWS % ways.choose_tiling(rows, 896, tokens).rows == 0 for rows, tokens in sizes)


@pytest.mark.parametrize(("rows", "columns", "tokens"), [(64, 100, 1), (12, 128, 1), (64, 128, 257), (64, 2**16, 8)])
def test_sizes_that_the_kernel_does_not_support_do_not_fit(rows, columns, tokens):
    assert not ways.fits(rows, columns, tokens)
    assert not has_kernels(torch.device("cpu"))


def test_a_default_tiling_is_nearly_the_fastest_that_was_measured():
    """By `qerl tune` on an H200, for the linears of a 1.5B, a 7B and of Qwen3.5-9B and 27B."""
    table = json.loads(Path("benchmarks/tilings/tune-nvidia-h200.json").read_text(encoding="utf-8"))
    assert len(table["measured"]) == 160
    for row in table["measured"]:
        taken = name_of(ways.default_tiling(row["rows"], row["columns"], row["tokens"]))
        assert row["us"][taken] < 1.07 * min(row["us"].values()), f"{row['rows']} x {row['columns']}: {taken}"


def test_cublas_takes_an_adapter_where_it_was_faster():
    sizes = (64, 18944), (128, 18944), (128, 3584), (513, 3584)
    assert [lora.kernels_pay(*size) for size in sizes] == [True, False, True, False]


def test_a_supported_adapter_is_supported_for_any_number_of_tokens():
    """49152 columns give 64 tasks for hidden values for up to 32 tokens, which is one too many, and 32 tasks above."""
    assert gemm.takes(4608, 3584)
    assert gemm.takes(264, 880)
    assert ways.fits(4608, 49152, 128)
    assert not gemm.takes(4608, 49152)
    assert gemm.takes(4608, 3584, 3 * 160)
    assert not gemm.takes(4608, 3584, 3 * 176)
    assert sorted({ways.token_tile(tokens) for tokens in range(1, 257)}) == list(ways.TOKEN_TILES)


@pytest.mark.parametrize(
    ("tokens", "launches"), [(256, [256]), (257, [256, 1]), (512, [256, 256]), (600, [256, 256, 88])]
)
def test_more_tokens_than_one_launch_supports_are_split(monkeypatch, tokens, launches):
    weight, x, bias = random_weight(64, 96), torch.randn(tokens, 96).bfloat16(), torch.randn(64).bfloat16()
    adapter, seen = random_adapter(64, 96, 16, (64,)), []

    def launch(x, weight, bias=None, adapter=None, out=None):
        seen.append(len(x))
        assert x.is_contiguous()
        value = gemm.reference_product(x, weight, bias, adapter).bfloat16()
        return value if out is None else out.copy_(value)

    monkeypatch.setattr(gemm, "product", launch)
    expected = gemm.reference_product(x, weight, bias, adapter)
    assert error(gemm.split_product(x, weight, bias, adapter), expected) < 3e-3
    assert seen == launches


@pytest.mark.parametrize(
    ("ranks", "tokens", "taken"),
    [(384, 128, True), (496, 256, True), (512, 256, False), (4080, 8, True), (4096, 8, False), (2048, 32, False)],
)
def test_an_adapter_needs_fewer_pieces_than_there_are_counters(loaded, ranks, tokens, taken):
    """There are 256 counters; a piece has 16 ranks and 8, 16 or 32 tokens."""
    adapter = Adapter(torch.empty(ranks, 64), torch.empty(64, ranks), (64,))
    x, weight = torch.empty(tokens, 64, dtype=torch.bfloat16), random_weight(64, 64)
    assert ways.fits(64, 64, tokens, ranks) is taken
    with nullcontext() if taken else pytest.raises(ValueError, match="no adapter of parts"):
        gemm.product(x, weight, None, adapter)
    assert bool(loaded) is taken


@pytest.fixture
def loaded(monkeypatch):
    """The kernels that products ask for, recorded without a card."""
    seen = set()

    def load(source, name, defines=()):
        seen.add((source, defines))
        return lambda launch, *arguments: None

    for module in (gemm, lora, decode):
        monkeypatch.setattr(module, "kernel", load)
    monkeypatch.setattr(gemm, "tensor_map", lambda *arguments, **options: None)
    nothing = dict.fromkeys(("flagged_hidden", "sums", "counters"))
    space = SimpleNamespace(blocks=2, hidden=lambda numbers, shape: (None, torch.empty(shape)), **nothing)
    monkeypatch.setattr(gemm, "work_space", lambda device, occupancy, cluster: space)
    monkeypatch.setattr(gemm, "holds_clusters", lambda tokens, tiling: True)
    return seen


@pytest.mark.parametrize("columns", [64, 880, 3584, 8176, 8192, 18944])
def test_the_variants_of_a_weight_are_those_that_its_products_load(loaded, columns):
    words, scales = torch.empty(1, dtype=torch.int32), torch.empty(1, dtype=torch.uint8)
    a = torch.empty(16, columns, dtype=torch.bfloat16)
    for rows in (64, 10240, 37888):
        weight = KernelWeight(QERL, words, scales, rows, columns, global_scale=1000.0)
        adapter = Adapter(a, torch.empty(rows, 16, dtype=torch.bfloat16), (rows,))
        for tokens in range(1, 257):
            x = torch.empty(tokens, columns, dtype=torch.bfloat16)
            gemm.product(x, weight, None, adapter if tokens % 2 else None)
        assert loaded == set(variants := gemm.variants(rows, columns))
        assert len(variants) == len(loaded)
        loaded.clear()
    for tokens in range(1, 257):
        lora.shrink(torch.empty(tokens, columns, dtype=torch.bfloat16), adapter.a)
    assert loaded == set(lora.variants(columns))
    loaded.clear()
    decode_(torch.empty(64, columns, dtype=torch.bfloat16), weight)
    assert loaded == {decode.OURS}


def test_a_work_space_is_not_made_in_a_capture(monkeypatch):
    """Zeroing it would become a node of that graph, and the first replay of another graph would find old values."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(EngineError, match="once before the capture"):
        gemm.work_space(torch.device("cpu"), 1, 0)
