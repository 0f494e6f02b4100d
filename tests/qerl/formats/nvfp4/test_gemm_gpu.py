"""The CUDA product kernels against the twin in float64, and bit for bit where they decode.

Each run has fresh random weights of every layout and odd sizes.
"""

import pytest
import torch

from qerl.formats.nvfp4 import gemm, lora, ways
from qerl.formats.nvfp4.decode import decode_, reference_decoded
from qerl.formats.nvfp4.kernel_layout import dequantize
from qerl.formats.nvfp4.lora import Adapter
from scripts.bench.linear_ways import product_of_ampere
from tests.helpers.gemm_cases import IN_ALL_LAYOUTS, assert_rounded, error, random_adapter, random_weight

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_seed")]
SIZES = [
    (256, 512),
    (1152, 896),
    (192, 128),
    (64, 48),  # smaller than a unit
    (64, 1088),
    (264, 880),  # the columns are not a multiple of 64
    (896, 4864),
    (34304, 192),  # more blocks of rows than processors
]
# The second is what an Ampere card would run, translated by the driver.
PRODUCTS = {"hopper": gemm.product, "ampere": product_of_ampere}
BY_EACH_KERNEL = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)


def assert_right_and_repeats(call, expected):
    """Check a product against the twin's; more calls have to give the same bits."""
    results = [call() for _ in range(4)]
    assert_rounded(results[0], expected)
    assert all(torch.equal(results[0], other) for other in results[1:])


def assert_right_with_an_adapter(product, weight, tokens, ranks, parts, biased=False):
    """Check a product with an adapter about as large as the base's product."""
    size = reference_decoded(weight).std().item() * weight.alpha
    x = torch.randn(tokens, weight.in_features, device="cuda").bfloat16()
    bias = torch.randn(weight.out_features, device="cuda").mul_(size).bfloat16() if biased else None
    adapter = random_adapter(weight.out_features, weight.in_features, ranks, parts, "cuda", size)
    if biased:
        assert_rounded(product(x, weight, bias), gemm.reference_product(x, weight, bias))
    expected = gemm.reference_product(x, weight, bias, adapter)
    assert_right_and_repeats(lambda: product(x, weight, bias, adapter), expected)


def parts_of(rows):
    """Two parts that do not end with a tile of the weight."""
    return (rows // 2 // 32 * 32, rows - rows // 2 // 32 * 32)


# Last run on an H200: 2026-11-24 those of adapters, 2026-11-22 the rest.
@pytest.mark.parametrize(("rows", "columns"), SIZES)
class TestOnGPU:
    @IN_ALL_LAYOUTS
    def test_decoding_is_exact(self, layout, rows, columns):
        weight = random_weight(rows, columns, layout, "cuda")
        expected = reference_decoded(weight)
        out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(decode_(out, weight).float(), expected)
        for start, count in ((40, rows - 40), (rows // 2 + 1, 7), (rows - 1, 1)):  # starts in the middle of a tile
            guarded = torch.full((count + 2, columns), 77.0, device="cuda", dtype=torch.bfloat16)
            decode_(guarded[1:-1], weight, start)
            assert torch.equal(guarded[1:-1].float(), expected[start : start + count])
            assert guarded[[0, -1]].eq(77.0).all()

    @IN_ALL_LAYOUTS
    def test_dequantizing_equals_that_of_the_twin(self, layout, rows, columns):
        from qerl.formats.nvfp4.kernels import dequantize_

        weight = random_weight(rows, columns, layout, "cuda")
        expected = dequantize(random_weight(rows, columns, layout), torch.float32)  # torch divides exactly on a CPU
        out = dequantize_(torch.empty(rows - 40, columns, device="cuda"), weight, 40)
        assert torch.equal(out.cpu().view(torch.int32), expected[40:].view(torch.int32))
        plain = dequantize_(torch.empty(rows, columns, device="cuda"), weight, scaled=False)
        assert torch.equal(plain, reference_decoded(weight))

    @BY_EACH_KERNEL
    @pytest.mark.parametrize("tokens", [1, 7, 8, 9, 17, 40, 64, 65, 96, 97, 128, 129, 192, 200, 256])
    def test_products_are_within_bfloat16_rounding_and_repeat(self, tokens, rows, columns, product):
        weight = random_weight(rows, columns, device="cuda", seed=tokens)
        assert_right_with_an_adapter(product, weight, tokens, 16 * (1 + tokens % 3), parts_of(rows), biased=True)


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 96, 128])
@pytest.mark.parametrize("size", list(ways.CLUSTERS))
def test_sums_that_a_cluster_exchanges(size, tokens, in_loop):
    """The last block of rows is cut off, and two parts of the adapter end inside a block."""
    tiling = ways.Tiling(4, 3, slabs=1 + size % 2, in_loop=in_loop, cluster=size)
    weight = random_weight(1320, 880, device="cuda", seed=tokens)
    given = tiling.shared_bytes(tokens) <= 227 * 1024

    def product(*arguments):
        return gemm.product(*arguments, tiling=tiling if given else ways.Tiling(4, 3, cluster=size, slabs=1))

    assert_right_with_an_adapter(product, weight, tokens, 32, (1000, 200, 120), biased=True)


def test_both_kinds_of_launches_follow_each_other_in_a_graph():
    """A launch starts while the one before it ends, and each kind counts its launches by itself."""
    shapes = [(1536, 1536), (1152, 896), (1536, 1536), (37888, 128), (4608, 1536), (1152, 896)]
    linears = [
        (random_weight(*shape, device="cuda"), random_adapter(*shape, 32, (shape[0],), "cuda")) for shape in shapes
    ]
    kinds = {ways.choose_tiling(*shape, 32).cluster for shape in shapes}
    assert kinds == {0, 3, 8}
    xs = {columns: torch.randn(32, columns, device="cuda").bfloat16() for _, columns in shapes}
    expected = [gemm.product(xs[weight.in_features], weight, None, adapter) for weight, adapter in linears]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [gemm.product(xs[weight.in_features], weight, None, adapter) for weight, adapter in linears * 4]
    for _ in range(20):
        for out in outs:
            out.zero_()
        graph.replay()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected * 4, strict=True))


@pytest.mark.parametrize("tokens", [257, 384, 512])
def test_a_split_product_on_the_card(tokens):
    weight = random_weight(1152, 880, device="cuda", seed=tokens)
    assert_right_with_an_adapter(gemm.split_product, weight, tokens, 32, (896, 128, 128), biased=True)


@pytest.mark.parametrize("tokens", [1, 8, 33, 256, 511])
@pytest.mark.parametrize("parts", [(3584,), (3584, 512, 512), (1000, 1000), (8, 24)])
@pytest.mark.parametrize("columns", [896, 18944])
def test_the_adapter_beside_another_kernels_product(tokens, parts, columns):
    rows = sum(parts)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    adapter = random_adapter(rows, columns, 32, parts, "cuda")
    base = torch.randn(tokens, rows, device="cuda").bfloat16()
    assert_right_and_repeats(lambda: lora.add_(base.clone(), x, adapter), lora.reference_add(base, x, adapter))


@pytest.mark.parametrize("tokens", [1, 8, 33, 256, 600])
@pytest.mark.parametrize("biased", [True, False])
def test_the_adapter_on_a_second_stream_also_in_a_graph(tokens, biased):
    parts, columns = (3584, 512, 512), 3584
    weight = torch.randn(sum(parts), columns, device="cuda").bfloat16()
    bias = torch.randn(sum(parts), device="cuda").bfloat16() if biased else None
    adapter = random_adapter(sum(parts), columns, 32, parts, "cuda", 60.0)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()

    def computed():
        return lora.product_with_adapter(lambda: x @ weight.t(), x, adapter, bias)

    first, graph = computed(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = [computed() for _ in range(8)]
    for _ in range(3):
        x.normal_()
        graph.replay()
        base = (x @ weight.t()).double() + (0 if bias is None else bias.double())
        expected = lora.reference_add(base, x, adapter)
        assert (kept[0].double() - expected).norm() < 0.006 * expected.norm()
        assert all(torch.equal(kept[0], other) for other in kept[1:])
    assert first.shape == kept[0].shape


def test_the_adapters_second_half_compiles_once_for_a_size_of_tile(compiled):
    """Sizes are 16, 32 and 64 tokens; any number of tokens uses one of them."""
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


@BY_EACH_KERNEL
@pytest.mark.parametrize("tokens", [1, 9, 33, 80, 128, 160, 256])
@pytest.mark.parametrize(("parts", "columns"), [((40, 8, 16), 64), ((200, 72, 40), 128), ((1000, 24, 8), 4864)])
def test_three_parts_that_end_inside_a_tile(tokens, parts, columns, product):
    """Each part has rank 16, or 48."""
    weight = random_weight(sum(parts), columns, device="cuda", seed=tokens)
    for ranks in (16, 48):
        assert_right_with_an_adapter(product, weight, tokens, ranks, parts)


@BY_EACH_KERNEL
def test_launches_of_other_sizes_in_between_leave_no_values_behind(product):
    """Launches of different sizes use the same memory; a stale value must never be taken for a new one."""
    weight = random_weight(896, 4864, device="cuda")
    adapter = random_adapter(896, 4864, 16, (896,), "cuda")
    for tokens in (1, 64, 9, 1, 256, 128, 17, 40, 8, 200, 33, 1, 64) * 3:
        x = torch.randn(tokens, 4864, device="cuda").bfloat16()
        out = product(x, weight, None, adapter)
        assert_rounded(out, gemm.reference_product(x, weight, None, adapter))


@BY_EACH_KERNEL
@pytest.mark.parametrize("tokens", [8, 100, 250])
def test_a_graph_of_many_layers_is_right_at_every_replay(tokens, product):
    """As in decoding, launches follow each other, and x and the adapter change in place between replays."""
    weights = [random_weight(1152, 896, device="cuda", seed=seed) for seed in range(8)]
    adapters = [random_adapter(1152, 896, 32, (896, 128, 128), "cuda", 0.1) for _ in weights]
    x = torch.randn(tokens, 896, device="cuda").bfloat16()

    def run():
        fused = [product(x, w, None, adapter) for w, adapter in zip(weights, adapters, strict=True)]
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


@BY_EACH_KERNEL
@pytest.mark.parametrize("tokens", [1, 16, 96, 128, 192, 256])
@pytest.mark.parametrize(("thirds", "more"), [(2, 0), (5, 0), (6, 2)], ids=["alone", "whole and alone", "two and cut"])
def test_each_way_of_distributing_the_rows(thirds, more, tokens, product):
    """Blocks of rows go to thirds of the processors. gate/up of a 3B is the first case, of a 70B the second."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count * thirds // 3 + more
    rows = ways.choose_tiling(2**15, 192, tokens).rows * blocks - 8
    weight = random_weight(rows, 192, device="cuda", seed=tokens)
    assert_right_with_an_adapter(product, weight, tokens, 32, parts_of(rows))


@BY_EACH_KERNEL
def test_an_adapter_that_the_launch_before_writes_is_read_after_it(product):
    """With few columns, B is loaded together with the first entry of the ring."""
    weight, new = random_weight(256 * 132, 64, device="cuda"), random_adapter(256 * 132, 64, 16, (256 * 132,), "cuda")
    adapter = Adapter(new.a, torch.zeros_like(new.b), new.part_rows)
    x = torch.randn(8, 64, device="cuda").bfloat16()
    expected = product(x, weight, None, new)
    for _ in range(50):
        adapter.b.copy_(new.b)
        assert torch.equal(product(x, weight, None, adapter), expected)
        adapter.b.zero_()


@BY_EACH_KERNEL
def test_launch_numbers_skip_zero(product):
    """The memory for hidden values starts as zeros, which must never count as written."""
    gemm.forget_work_space()
    for rows, kinds in ((896, [(1, 0), (2, 0)]), (1536, [(1, 8)])):
        weight = random_weight(rows, 1536, device="cuda")
        adapter = random_adapter(rows, 1536, 16, (rows,), "cuda")
        for kind in kinds:
            space = gemm.work_space(weight.words.device, *kind)
            space.counters[-1] = space.blocks * (2**32 - 2)
        for tokens in (8, 16, 64, 256):
            x = torch.randn(tokens, 1536, device="cuda").bfloat16()
            expected = gemm.reference_product(x, weight, None, adapter)
            assert_rounded(product(x, weight, None, adapter), expected)


@BY_EACH_KERNEL
def test_work_space_that_grows_between_launches(product):
    """960 ranks with 8064 columns need more than the 2^20 sums that the first work space has room for."""
    weight = random_weight(512, 8064, device="cuda")
    for ranks in (16, 960, 16, 960):
        assert_right_with_an_adapter(product, weight, 128, ranks, (512,))


@BY_EACH_KERNEL
def test_values_of_a_launch_that_is_still_running_are_read_after_they_are_written(product):
    """The launch right before writes x, and `shrink` lets the next launch begin while it is running."""
    weight = random_weight(896, 4864, device="cuda")
    adapter = random_adapter(896, 4864, 32, (896,), "cuda")
    new, x = torch.randn(8, 4864, device="cuda").bfloat16(), torch.zeros(8, 4864, device="cuda").bfloat16()
    product(x, weight, None, adapter)  # so that it is compiled and loaded
    lora.shrink(x, adapter.a)
    outs = []

    def run():
        for _ in range(20):
            x.copy_(new)
            outs.append(product(x, weight, None, adapter))
            lora.shrink(x, adapter.a)
            outs.append(product(x, weight, None, adapter))
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
