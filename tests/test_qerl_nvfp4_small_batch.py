"""Products with few tokens. On a CPU: the twin against plain products, and the sizes. With `-m gpu`: the CUDA kernels
against the twin in float64, bit for bit where they decode, on fresh random weights of every layout and odd sizes."""

import re

import pytest
import torch

from qerl.nvfp4 import lora, nvrtc, small_batch, split
from qerl.nvfp4.kernel_layout import HUMMING_MMA, HUMMING_WGMMA, MARLIN, KernelWeight, dequantize
from qerl.nvfp4.lora import Adapter
from qerl.nvfp4.nvrtc import has_kernels

LAYOUTS = pytest.mark.parametrize("layout", [HUMMING_WGMMA, HUMMING_MMA, MARLIN], ids=["wgmma", "mma", "marlin"])
SIZES = [(256, 512), (1152, 896), (192, 96), (64, 1040), (896, 4864)]


def random_weight(rows, columns, layout, device="cpu", seed=0):
    """Any words and scales are a valid weight; rows are padded as Humming pads them."""
    generator = torch.Generator().manual_seed(seed)
    padded = -(-rows // 256) * 256
    words = torch.randint(-(2**31), 2**31 - 1, (columns // 16, 2 * padded), generator=generator, dtype=torch.int32)
    low, high = (60, 120) if layout.marlin_scales else (0, 0x7F)  # 0x7f is e4m3's NaN; Marlin stores no subnormals
    scales = torch.randint(low, high, (columns // 16, padded), generator=generator, dtype=torch.uint8)
    scales = scales if layout.marlin_scales else scales.view(torch.float8_e4m3fn)
    return KernelWeight(layout, words.to(device), scales.to(device), rows, columns, global_scale=1000.0)


def error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


@LAYOUTS
def test_the_twin_is_the_product_with_the_decoded_weight(layout):
    weight = random_weight(192, 96, layout)
    x, bias = torch.randn(5, 96).bfloat16(), torch.randn(192).bfloat16()
    plain = x.double() @ dequantize(weight, torch.float32).double().t() + bias.double()
    assert error(small_batch.reference_product(x, weight, bias), plain) < 1e-6


def random_adapter(rows, columns, ranks, parts, device="cpu", size=1.0):
    """B as blocks on a diagonal; `ranks` of each part."""
    a = torch.randn(ranks * len(parts), columns, device=device).mul_(0.05).bfloat16()
    b = torch.zeros(rows, ranks * len(parts), device=device, dtype=torch.bfloat16)
    for index, part in enumerate(parts):
        start = sum(parts[:index])
        b[start : start + part, ranks * index : ranks * (index + 1)].normal_(0, size)
    return Adapter.with_handover(a, b, tuple(parts))


def test_the_twins_adapter_rounds_its_hidden_values_once():
    weight, x = random_weight(64, 96, HUMMING_WGMMA), torch.randn(3, 96).bfloat16()
    adapter = random_adapter(64, 96, 16, (64,))
    hidden = (x.double() @ adapter.a.double().t()).bfloat16().double()
    difference = small_batch.reference_product(x, weight, None, adapter) - small_batch.reference_product(x, weight)
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
        (torch.zeros(65, 96, dtype=torch.bfloat16), "65 tokens of 96 columns"),
        (torch.zeros(4, 112, dtype=torch.bfloat16), r"\(4, 112\)"),
        (torch.zeros(4, 96), "float32"),
        (torch.zeros(96, 4, dtype=torch.bfloat16).t(), "not contiguous"),
    ],
    ids=["tokens", "columns", "dtype", "strides"],
)
def test_an_input_that_the_kernel_would_misread_is_refused(x, what):
    with pytest.raises(ValueError, match=what):
        small_batch.product(x, random_weight(64, 96, HUMMING_WGMMA))


@pytest.mark.parametrize("ranks", [16, 48, 96, 384])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(64, 16), (192, 96), (1152, 896), (4608, 3584), (3584, 18944), (16384, 8192), (37888, 3584), (57344, 8192)],
)
def test_every_number_of_tokens_finds_its_slot_and_its_words(rows, columns, ranks):
    """One adapter's launches of all sizes, as a process may make them."""
    adapter = Adapter.with_handover(
        torch.empty(ranks, columns, device="meta"), torch.empty(rows, ranks, device="meta"), (rows,)
    )
    sizes = [tokens for tokens in range(1, split.MAX_TOKENS + 1) if split.fits(rows, columns, tokens)]
    assert sizes
    for tokens in sizes:
        chosen = split.choose_split(rows, columns, tokens)
        small_batch._adapter_arguments(adapter, tokens, -(-rows // (64 * chosen.warps_n)), chosen)
    assert len(adapter.slots) <= 5


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4), (33, 8), (64, 8)])
def test_tokens_fill_tiles_of_eight(tokens, tiles):
    assert split.tiles(tokens) == tiles


@pytest.mark.parametrize(("rows", "columns"), [(4608, 3584), (37888, 3584), (3584, 18944), (64, 16), (57344, 8192)])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_a_split_fits_the_card_and_leaves_no_block_without_work(rows, columns, tokens):
    assert split.fits(rows, columns, tokens)
    chosen = split.choose_split(rows, columns, tokens)
    assert chosen.cluster == 1 or columns // 16 >= 4 * chosen.cluster


def test_a_slice_of_x_that_is_too_large_for_a_block_does_not_fit():
    assert split.fits(3584, 18944, 32)
    assert not split.fits(3584, 18944, 64)
    assert not split.fits(3584, 3584, 65)


def test_source_and_split_agree_on_the_number_of_counters():
    source = (nvrtc.FOLDER / "common.cuh").read_text(encoding="utf-8")
    assert re.findall(r"#define HANDOVER_SLOTS (\d+)", source) == [str(split.HANDOVER_SLOTS)]


def test_a_cpu_has_no_kernels():
    assert not has_kernels(torch.device("cpu"))


# Last run on an H200: see the closing note of the release.
@pytest.mark.gpu
@LAYOUTS
@pytest.mark.parametrize(("rows", "columns"), SIZES)
class TestOnGPU:
    def test_decoding_is_exact(self, layout, rows, columns):
        weight = random_weight(rows, columns, layout, "cuda")
        expected = small_batch.reference_decoded(weight)
        out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(small_batch.decode_(out, weight).float(), expected)
        part = torch.empty(rows - 40, columns, device="cuda", dtype=torch.bfloat16)  # a start inside a tile
        assert torch.equal(small_batch.decode_(part, weight, 40).float(), expected[40:])

    @pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 40, 64])
    def test_base_bias_and_adapter_are_within_bf16_rounding_and_repeat(self, layout, rows, columns, tokens):
        weight = random_weight(rows, columns, layout, "cuda", seed=tokens)
        size = small_batch.reference_decoded(weight).std().item() * weight.alpha
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        bias = torch.randn(rows, device="cuda").mul_(size).bfloat16()
        adapter = random_adapter(rows, columns, 16 * (1 + tokens % 3), parts_of(rows), "cuda", size)
        plain = small_batch.reference_product(x, weight, bias)
        assert error(small_batch.product(x, weight, bias), plain) < 2.5e-3
        results = [small_batch.product(x, weight, bias, adapter) for _ in range(4)]
        assert error(results[0], small_batch.reference_product(x, weight, bias, adapter)) < 2.5e-3
        assert all(torch.equal(results[0], other) for other in results[1:])
        blocks = next(iter(adapter.slots))
        assert adapter.handover[0].item() == len(results) * blocks  # each block drew one ticket


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
    assert error(results[0], lora.reference_add(base, x, adapter)) < 2.5e-3
    assert all(torch.equal(results[0], other) for other in results[1:])


# Not yet run on a card.
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 33])
@pytest.mark.parametrize(("parts", "columns"), [((40, 8, 16), 16), ((200, 72, 40), 112), ((1000, 24, 8), 4864)])
def test_three_parts_that_end_inside_a_tile(tokens, parts, columns):
    """Ranks 16 and 48 of each part; the first shape is one tile, narrower than a cluster."""
    rows = sum(parts)
    weight = random_weight(rows, columns, HUMMING_WGMMA, "cuda", seed=tokens)
    size = small_batch.reference_decoded(weight).std().item() * weight.alpha
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    for ranks in (16, 48):
        adapter = random_adapter(rows, columns, ranks, parts, "cuda", size)
        expected = small_batch.reference_product(x, weight, None, adapter)
        assert error(small_batch.product(x, weight, None, adapter), expected) < 2.5e-3


@pytest.mark.gpu
def test_launches_of_other_sizes_between_leave_no_value_behind():
    """The values of a launch lie where another size's lay: a stale one must never be taken for new."""
    weight = random_weight(896, 4864, HUMMING_WGMMA, "cuda")
    adapter = random_adapter(896, 4864, 16, (896,), "cuda")
    for tokens in (1, 64, 9, 1, 17, 40, 8, 33, 1, 64) * 3:
        x = torch.randn(tokens, 4864, device="cuda").bfloat16()
        out = small_batch.product(x, weight, None, adapter)
        assert error(out, small_batch.reference_product(x, weight, None, adapter)) < 2.5e-3
    assert len(adapter.slots) > 3


@pytest.mark.gpu
def test_a_graph_of_many_layers_hands_over_right_at_every_replay():
    """What decoding does: launches one behind another, x and the adapter changed in place between replays."""
    weights = [random_weight(1152, 896, HUMMING_WGMMA, "cuda", seed) for seed in range(8)]
    adapters = [random_adapter(1152, 896, 32, (896, 128, 128), "cuda", 0.1) for _ in weights]
    x = torch.randn(8, 896, device="cuda").bfloat16()

    def run():
        fused = [small_batch.product(x, w, None, adapter) for w, adapter in zip(weights, adapters, strict=True)]
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
            expected = lora.reference_add(small_batch.reference_product(x, weight, None, adapter), x, adapter)
            assert error(out, expected) < 5e-3
