"""Our product kernels. On a CPU: the twin against plain products, and the sizes. With `-m gpu`: the CUDA kernels
against the twin in float64, bit for bit where they decode, on fresh random weights of every layout and odd sizes."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from qerl.cuda import nvrtc
from qerl.cuda.nvrtc import has_kernels
from qerl.errors import EngineError
from qerl.nvfp4 import decode, gemm, lora, slab_layout, tiling
from qerl.nvfp4.decode import WARP_COLUMNS, WARP_ROWS, decode_, dequantize_by_twin_, reference_decoded
from qerl.nvfp4.kernel_layout import HUMMING_MMA, HUMMING_WGMMA, MARLIN, QERL, KernelWeight, dequantize
from qerl.nvfp4.lora import Adapter

pytestmark = pytest.mark.usefixtures("fresh_seed")
LAYOUTS = {"qerl": QERL, "wgmma": HUMMING_WGMMA, "mma": HUMMING_MMA, "marlin": MARLIN}
IN_ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
SIZES = [
    (256, 512),
    (1152, 896),
    (192, 128),
    (64, 48),  # less than a unit
    (64, 1088),
    (264, 880),  # columns that are no whole units of 64
    (896, 4864),
    (34304, 192),  # more blocks of rows than processors
]


def random_weight(rows, columns, layout=QERL, device="cpu", seed=0):
    """Any codes; block scales over all of e4m3, a tenth of them zero. Of vLLM's kernels any words and scales, with rows
    padded as Humming pads them. In one test the same for the same `seed`."""
    generator = torch.Generator().manual_seed(torch.initial_seed() + seed)
    if layout is QERL:
        packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(0, 0x7F, (rows, columns // 16), generator=generator, dtype=torch.uint8)
        scales[torch.rand(scales.shape, generator=generator) < 0.1] = 0
        words, scales = slab_layout.pack(packed.to(device), scales.view(torch.float8_e4m3fn).to(device))
        return KernelWeight(layout, words, scales, rows, columns, global_scale=1000.0)
    padded = -(-rows // 256) * 256
    words = torch.randint(-(2**31), 2**31 - 1, (columns // 16, 2 * padded), generator=generator, dtype=torch.int32)
    low, high = (60, 120) if layout.marlin_scales else (0, 0x7F)  # 0x7f is e4m3's NaN; Marlin stores no subnormals
    scales = torch.randint(low, high, (columns // 16, padded), generator=generator, dtype=torch.uint8)
    scales = scales if layout.marlin_scales else scales.view(torch.float8_e4m3fn)
    return KernelWeight(layout, words.to(device), scales.to(device), rows, columns, global_scale=1000.0)


def error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


def assert_rounded(value, expected):
    """To bfloat16: 2.5e-3 bounds many outputs; a few, of which one outweighs the rest, can be rounded worse."""
    assert error(value, expected) < max(2.5e-3, 1.5 * error(expected.bfloat16(), expected))


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


def random_adapter(rows, columns, ranks, parts, device="cpu", size=1.0):
    """B as blocks on a diagonal; `ranks` of each part."""
    a = torch.randn(ranks * len(parts), columns, device=device).mul_(0.05).bfloat16()
    b = torch.zeros(rows, ranks * len(parts), device=device, dtype=torch.bfloat16)
    for index, part in enumerate(parts):
        start = sum(parts[:index])
        b[start : start + part, ranks * index : ranks * (index + 1)].normal_(0, size)
    return Adapter(a, b, tuple(parts))


def test_the_twins_adapter_rounds_its_hidden_values_once():
    weight, x = random_weight(64, 96), torch.randn(3, 96).bfloat16()
    adapter = random_adapter(64, 96, 16, (64,))
    hidden = (x.double() @ adapter.a.double().t()).bfloat16().double()
    difference = gemm.reference_product(x, weight, None, adapter) - gemm.reference_product(x, weight)
    torch.testing.assert_close(difference, hidden @ adapter.b.double().t(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("parts", "rank", "fits"), [((64,), 16, True), ((64, 8, 8), 32, True), ((64, 8), 24, False)])
def test_which_adapters_the_kernels_take(parts, rank, fits):
    assert random_adapter(sum(parts), 32, rank, parts).fits_kernels is fits


def test_cublas_takes_an_adapter_where_it_was_faster():
    assert [lora.kernels_pay(*size) for size in ((64, 18944), (128, 18944), (128, 3584), (513, 3584))] == [
        *[True, False],
        *[True, False],
    ]


def test_four_parts_are_too_many_for_the_kernels():
    assert not random_adapter(64, 32, 16, (16,) * 4).fits_kernels


@pytest.mark.parametrize(("columns", "fits"), [(40, True), (36, False)])
def test_the_kernels_take_no_rows_that_begin_between_16_bytes(columns, fits):
    assert random_adapter(64, columns, 16, (64,)).fits_kernels is fits


@pytest.mark.parametrize(
    ("x", "what"),
    [
        (torch.zeros(257, 128, dtype=torch.bfloat16), "257 tokens"),
        (torch.zeros(4, 192, dtype=torch.bfloat16), r"\(4, 192\)"),
        (torch.zeros(4, 128), "float32"),
        (torch.zeros(128, 4, dtype=torch.bfloat16).t(), "not contiguous"),
    ],
    ids=["tokens", "columns", "dtype", "strides"],
)
def test_an_input_that_the_kernel_would_misread_is_refused(x, what):
    with pytest.raises(ValueError, match=what):
        gemm.product(x, random_weight(64, 128))


@pytest.mark.parametrize("layout", [HUMMING_WGMMA, MARLIN], ids=["humming", "marlin"])
def test_a_weight_in_another_kernels_layout_is_refused(layout):
    with pytest.raises(ValueError, match=f"as {layout.name} keeps it"):
        gemm.product(torch.zeros(4, 128, dtype=torch.bfloat16), random_weight(64, 128, layout))


@pytest.mark.parametrize("adapter", ["rank", "parts"])
def test_an_adapter_that_the_kernel_would_misread_is_refused(adapter):
    wrong = random_adapter(64, 128, 24, (64,)) if adapter == "rank" else random_adapter(64, 128, 16, (16,) * 4)
    with pytest.raises(ValueError, match="no adapter of parts"):
        gemm.product(torch.zeros(4, 128, dtype=torch.bfloat16), random_weight(64, 128), None, wrong)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256])
@pytest.mark.parametrize("columns", [64, 880, 896, 3584, 8192, 18944, 29568])
def test_a_tiling_fits_the_card_and_its_counters(tokens, columns):
    """227 KiB of shared memory a block on Hopper; fused q/k/v of rank 128 have the most hidden values."""
    chosen = tiling.choose_tiling(columns, tokens)
    assert tiling.fits(4608, columns, tokens)
    assert chosen.shared_bytes(tokens) <= 226 * 1024
    assert chosen.stages >= 4
    assert chosen.rows * tiling.token_tile(tokens) <= tiling.MAX_SUMS
    assert chosen.heaps(tokens, 3 * 128) < tiling.MAX_HEAPS
    assert chosen.parts(columns) < tiling.MAX_PARTS
    assert chosen.parts(columns) * 32 * tiling.WARPS * chosen.batch >= columns
    smaller = [tile for tile in tiling.TOKEN_TILES if tile < tiling.token_tile(tokens)]
    assert tiling.token_tile(tokens) >= tokens > max(smaller, default=0)


def test_sources_and_layout_agree_on_sizes():
    source = (nvrtc.FOLDER / "gemm.cu").read_text(encoding="utf-8")
    assert int(re.search(r"#define UNIT (\d+)", source)[1]) == tiling.UNIT == slab_layout.UNIT
    assert int(re.search(r"#define LAID_ROWS (\d+)", source)[1]) == slab_layout.ROWS
    assert 4 * int(re.search(r"#define GROUPS (\d+)", source)[1]) == tiling.WARPS
    most, few, many = map(int, re.search(r"#define SLABS \(TOKENS <= (\d+) \? (\d) : (\d)\)", source).groups())
    assert all(tiling.choose_tiling(896, n).slabs == (few if n <= most else many) for n in tiling.TOKEN_TILES)
    decoding = (nvrtc.FOLDER / "decode_slabs.cu").read_text(encoding="utf-8")
    sizes = {name: int(re.search(rf"#define {name} (\d+)", decoding)[1]) for name in ("LAID_SLABS", "SLABS", "UNITS")}
    assert sizes["LAID_SLABS"] * slab_layout.SLAB == slab_layout.ROWS
    assert (16 * sizes["SLABS"], 64 * sizes["UNITS"]) == (WARP_ROWS, WARP_COLUMNS)
    assert all(slab_layout.ROWS % tiling.choose_tiling(896, tokens).rows == 0 for tokens in tiling.TOKEN_TILES)


@pytest.mark.parametrize(("rows", "columns", "tokens"), [(64, 100, 1), (12, 128, 1), (64, 128, 257), (64, 2**16, 8)])
def test_what_the_kernel_cannot_take_does_not_fit(rows, columns, tokens):
    assert not tiling.fits(rows, columns, tokens)


def test_what_is_taken_is_taken_at_any_number_of_tokens():
    """49152 columns are 64 tasks for hidden values up to 32 tokens, one too many, and 32 above."""
    assert gemm.takes(4608, 3584)
    assert gemm.takes(264, 880)
    assert tiling.fits(4608, 49152, 128)
    assert not gemm.takes(4608, 49152)
    assert gemm.takes(4608, 3584, 3 * 160)
    assert not gemm.takes(4608, 3584, 3 * 176)
    assert sorted({tiling.token_tile(tokens) for tokens in range(1, 257)}) == list(tiling.TOKEN_TILES)


@pytest.mark.parametrize(
    ("tokens", "launches"), [(256, [256]), (257, [256, 1]), (512, [256, 256]), (600, [256, 256, 88])]
)
def test_more_tokens_than_a_launch_takes_are_split(monkeypatch, tokens, launches):
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
def test_an_adapter_needs_fewer_pieces_than_there_are_counters(ranks, tokens, taken):
    """256; a piece is 16 ranks and 8, 16 or 32 tokens."""
    adapter = Adapter(torch.empty(ranks, 64, device="meta"), torch.empty(64, ranks, device="meta"), (64,))
    x, weight = torch.empty(tokens, 64, dtype=torch.bfloat16), random_weight(64, 64)
    assert tiling.fits(64, 64, tokens, ranks) is taken
    with nullcontext() if taken else pytest.raises(ValueError, match="no adapter of parts"):
        gemm._check(x, weight, adapter)


@pytest.fixture
def loaded(monkeypatch):
    """What products, without a card, ask to be loaded."""
    seen = set()

    def load(source, name, defines=()):
        seen.add((source, defines))
        return lambda launch, *arguments: None

    for module in (gemm, lora, decode):
        monkeypatch.setattr(module, "kernel", load)
    monkeypatch.setattr(gemm, "tensor_map", lambda *arguments, **options: None)
    nothing = dict.fromkeys(("flagged_hidden", "sums", "counters"))
    space = SimpleNamespace(blocks=2, hidden=lambda numbers, shape: (None, torch.empty(shape)), **nothing)
    monkeypatch.setattr(gemm, "_work_space", lambda device: space)
    return seen


@pytest.mark.parametrize("columns", [64, 880, 3584, 8176, 8192, 18944])
def test_the_variants_of_a_width_are_what_its_products_load(loaded, columns):
    words, scales = torch.empty(1, dtype=torch.int32), torch.empty(1, dtype=torch.uint8)
    weight = KernelWeight(QERL, words, scales, 64, columns, global_scale=1000.0)
    adapter = Adapter(torch.empty(16, columns, dtype=torch.bfloat16), torch.empty(64, 16, dtype=torch.bfloat16), (64,))
    for tokens in range(1, 257):
        x = torch.empty(tokens, columns, dtype=torch.bfloat16)
        gemm.product(x, weight, None, adapter if tokens % 2 else None)
    variants = gemm.variants(columns)
    assert loaded == set(variants)
    assert len(variants) == len(tiling.TOKEN_TILES) == len(loaded)
    loaded.clear()
    for tokens in range(1, 257):
        lora.shrink(torch.empty(tokens, columns, dtype=torch.bfloat16), adapter.a)
    assert loaded == set(lora.variants(columns))
    loaded.clear()
    decode_(torch.empty(64, columns, dtype=torch.bfloat16), weight)
    assert loaded == {decode.OURS}


def test_a_work_space_is_not_made_in_a_capture(monkeypatch):
    """Its zeros would be a node of the graph, and another graph's first replay would find what lay there before."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(EngineError, match="once before the capture"):
        gemm._work_space(torch.device("cpu"))


def test_a_cpu_has_no_kernels():
    assert not has_kernels(torch.device("cpu"))


# Last run on an H200: 2026-11-22.
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), SIZES)
class TestOnGPU:
    @IN_ALL_LAYOUTS
    def test_decoding_is_exact(self, layout, rows, columns):
        weight = random_weight(rows, columns, layout, "cuda")
        expected = reference_decoded(weight)
        out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(decode_(out, weight).float(), expected)
        for start, count in ((40, rows - 40), (rows // 2 + 1, 7), (rows - 1, 1)):  # starts inside a tile
            guarded = torch.full((count + 2, columns), 77.0, device="cuda", dtype=torch.bfloat16)
            decode_(guarded[1:-1], weight, start)
            assert torch.equal(guarded[1:-1].float(), expected[start : start + count])
            assert guarded[[0, -1]].eq(77.0).all()

    @IN_ALL_LAYOUTS
    def test_dequantizing_is_the_twins(self, layout, rows, columns):
        from qerl.nvfp4.kernels import dequantize_

        weight = random_weight(rows, columns, layout, "cuda")
        expected = dequantize(random_weight(rows, columns, layout), torch.float32)  # torch divides exactly on a CPU
        out = dequantize_(torch.empty(rows - 40, columns, device="cuda"), weight, 40)
        assert torch.equal(out.cpu().view(torch.int32), expected[40:].view(torch.int32))
        plain = dequantize_(torch.empty(rows, columns, device="cuda"), weight, scaled=False)
        assert torch.equal(plain, reference_decoded(weight))

    @pytest.mark.parametrize("tokens", [1, 7, 8, 9, 17, 40, 64, 65, 96, 97, 128, 129, 192, 200, 256])
    def test_base_bias_and_adapter_are_within_bf16_rounding_and_repeat(self, rows, columns, tokens):
        weight = random_weight(rows, columns, device="cuda", seed=tokens)
        size = reference_decoded(weight).std().item() * weight.alpha
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        bias = torch.randn(rows, device="cuda").mul_(size).bfloat16()
        adapter = random_adapter(rows, columns, 16 * (1 + tokens % 3), parts_of(rows), "cuda", size)
        plain = gemm.reference_product(x, weight, bias)
        assert_rounded(gemm.product(x, weight, bias), plain)
        results = [gemm.product(x, weight, bias, adapter) for _ in range(4)]
        assert_rounded(results[0], gemm.reference_product(x, weight, bias, adapter))
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [257, 384, 512])
def test_a_split_product_on_the_card(tokens):
    weight = random_weight(1152, 880, device="cuda", seed=tokens)
    size = reference_decoded(weight).std().item() * weight.alpha
    x, bias = torch.randn(tokens, 880, device="cuda").bfloat16(), torch.randn(1152, device="cuda").bfloat16()
    adapter = random_adapter(1152, 880, 32, (896, 128, 128), "cuda", size)
    results = [gemm.split_product(x, weight, bias, adapter) for _ in range(4)]
    assert_rounded(results[0], gemm.reference_product(x, weight, bias, adapter))
    assert all(torch.equal(results[0], other) for other in results[1:])


def assert_right_with_an_adapter(weight, tokens, ranks, parts):
    """About as large as the base's product; a repeated call has the same bits."""
    size = reference_decoded(weight).std().item() * weight.alpha
    adapter = random_adapter(weight.out_features, weight.in_features, ranks, parts, "cuda", size)
    x = torch.randn(tokens, weight.in_features, device="cuda").bfloat16()
    results = [gemm.product(x, weight, None, adapter) for _ in range(4)]
    assert_rounded(results[0], gemm.reference_product(x, weight, None, adapter))
    assert all(torch.equal(results[0], other) for other in results[1:])


def parts_of(rows):
    """Two parts that do not end with a tile of the weight."""
    return (rows // 2 // 32 * 32, rows - rows // 2 // 32 * 32)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33, 256, 511])
@pytest.mark.parametrize("parts", [(3584,), (3584, 512, 512), (1000, 1000), (8, 24)])
@pytest.mark.parametrize("columns", [896, 18944])
def test_the_adapter_beside_another_kernels_product(tokens, parts, columns):
    rows = sum(parts)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    adapter = random_adapter(rows, columns, 32, parts, "cuda")
    base = torch.randn(tokens, rows, device="cuda").bfloat16()
    results = [lora.add_(base.clone(), x, adapter) for _ in range(4)]
    assert_rounded(results[0], lora.reference_add(base, x, adapter))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
def test_the_adapters_second_half_compiles_once_for_a_size_of_tile(compiled):
    """16 tokens, 32, 64, by whatever number there is."""
    adapter = random_adapter(512, 256, 16, (512,), "cuda")

    def add(tokens):
        x = torch.zeros(tokens, 256, device="cuda", dtype=torch.bfloat16)
        lora.add_(torch.zeros(tokens, 512, device="cuda", dtype=torch.bfloat16), x, adapter)

    for tokens in (5, 20, 40):
        add(tokens)
    compiled.clear()
    for tokens in (1, 16, 32, 33, 64, 200):
        add(tokens)
    assert compiled == []


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 33, 80, 128, 160, 256])
@pytest.mark.parametrize(("parts", "columns"), [((40, 8, 16), 64), ((200, 72, 40), 128), ((1000, 24, 8), 4864)])
def test_three_parts_that_end_inside_a_tile(tokens, parts, columns):
    """Ranks 16 and 48 of each part."""
    weight = random_weight(sum(parts), columns, device="cuda", seed=tokens)
    for ranks in (16, 48):
        assert_right_with_an_adapter(weight, tokens, ranks, parts)


@pytest.mark.gpu
def test_launches_of_other_sizes_between_leave_no_value_behind():
    """The values of a launch lie where another size's lay: a stale one must never be taken for new."""
    weight = random_weight(896, 4864, device="cuda")
    adapter = random_adapter(896, 4864, 16, (896,), "cuda")
    for tokens in (1, 64, 9, 1, 256, 128, 17, 40, 8, 200, 33, 1, 64) * 3:
        x = torch.randn(tokens, 4864, device="cuda").bfloat16()
        out = gemm.product(x, weight, None, adapter)
        assert_rounded(out, gemm.reference_product(x, weight, None, adapter))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 100, 250])
def test_a_graph_of_many_layers_is_right_at_every_replay(tokens):
    """What decoding does: launches one behind another, x and the adapter changed in place between replays."""
    weights = [random_weight(1152, 896, device="cuda", seed=seed) for seed in range(8)]
    adapters = [random_adapter(1152, 896, 32, (896, 128, 128), "cuda", 0.1) for _ in weights]
    x = torch.randn(tokens, 896, device="cuda").bfloat16()

    def run():
        fused = [gemm.product(x, w, None, adapter) for w, adapter in zip(weights, adapters, strict=True)]
        return [lora.add_(out, x, adapter) for out, adapter in zip(fused, adapters, strict=True)]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(20):
        x.normal_()
        for adapter in adapters:
            adapter.a.normal_(0, 0.05)
        graph.replay()
        for out, weight, adapter in zip(outs, weights, adapters, strict=True):
            expected = lora.reference_add(gemm.reference_product(x, weight, None, adapter), x, adapter)
            assert error(out, expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 96, 128, 192, 256])
@pytest.mark.parametrize(("thirds", "more"), [(2, 0), (5, 0), (6, 2)], ids=["alone", "whole and alone", "two and cut"])
def test_each_way_of_sharing_out_the_rows(thirds, more, tokens):
    """Blocks of rows by thirds of the processors. A 3B's gate/up is the first, a 70B's the second."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count * thirds // 3 + more
    rows = tiling.choose_tiling(192, tokens).rows * blocks - 8
    assert_right_with_an_adapter(random_weight(rows, 192, device="cuda", seed=tokens), tokens, 32, parts_of(rows))


@pytest.mark.gpu
def test_an_adapter_that_the_launch_before_writes_is_read_after_it():
    """Few columns: B is asked for with the first of the ring."""
    weight, new = random_weight(256 * 132, 64, device="cuda"), random_adapter(256 * 132, 64, 16, (256 * 132,), "cuda")
    adapter = Adapter(new.a, torch.zeros_like(new.b), new.part_rows)
    x = torch.randn(8, 64, device="cuda").bfloat16()
    expected = gemm.product(x, weight, None, new)
    for _ in range(50):
        adapter.b.copy_(new.b)
        assert torch.equal(gemm.product(x, weight, None, adapter), expected)
        adapter.b.zero_()


@pytest.mark.gpu
def test_launch_numbers_skip_zero():
    """The memory for hidden values begins as zeros, which must never count as written."""
    weight = random_weight(896, 512, device="cuda")
    adapter = random_adapter(896, 512, 16, (896,), "cuda")
    gemm.forget_work_space()
    space = gemm._work_space(weight.words.device)
    space.counters[-1] = space.blocks * (2**32 - 2)
    for tokens in (8, 16, 64, 256):
        x = torch.randn(tokens, 512, device="cuda").bfloat16()
        expected = gemm.reference_product(x, weight, None, adapter)
        assert_rounded(gemm.product(x, weight, None, adapter), expected)


@pytest.mark.gpu
def test_work_space_that_grows_between_launches():
    """960 ranks of 8064 columns leave more than the 2^20 sums that the first work space has room for."""
    weight = random_weight(512, 8064, device="cuda")
    for ranks in (16, 960, 16, 960):
        assert_right_with_an_adapter(weight, 128, ranks, (512,))


@pytest.mark.gpu
def test_a_launch_before_that_still_runs_has_written_what_is_read():
    """x is written by the launch right before; `shrink` lets the next launch onto the card while it runs."""
    weight = random_weight(896, 4864, device="cuda")
    adapter = random_adapter(896, 4864, 32, (896,), "cuda")
    new, x = torch.randn(8, 4864, device="cuda").bfloat16(), torch.zeros(8, 4864, device="cuda").bfloat16()
    gemm.product(x, weight, None, adapter)  # compiled and loaded
    lora.shrink(x, adapter.a)
    outs = []

    def run():
        for _ in range(20):
            x.copy_(new)
            outs.append(gemm.product(x, weight, None, adapter))
            lora.shrink(x, adapter.a)
            outs.append(gemm.product(x, weight, None, adapter))
            x.zero_()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(outs[0], other) for other in outs[1:])
    assert_rounded(outs[0], gemm.reference_product(new, weight, None, adapter))
