"""Products with few tokens. On a CPU: the twin against plain products, and the sizes. With `-m gpu`: the CUDA kernels
against the twin in float64, bit for bit where they decode, on fresh random weights of every layout and odd sizes."""

import pytest
import torch

from qerl.nvfp4 import small_batch
from qerl.nvfp4.kernel_layout import HUMMING_MMA, HUMMING_WGMMA, MARLIN, KernelWeight, dequantize

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


def test_the_twins_adapter_rounds_its_hidden_values_once():
    weight = random_weight(64, 96, HUMMING_WGMMA)
    x, a, b = torch.randn(3, 96).bfloat16(), torch.randn(16, 96).bfloat16(), torch.randn(64, 16).bfloat16()
    hidden = (x.double() @ a.double().t()).bfloat16().double()
    difference = small_batch.reference_product(x, weight, None, a, b) - small_batch.reference_product(x, weight)
    torch.testing.assert_close(difference, hidden @ b.double().t(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4), (33, 8), (64, 8)])
def test_tokens_fill_tiles_of_eight(tokens, tiles):
    assert small_batch.tiles(tokens) == tiles


@pytest.mark.parametrize(("rows", "columns"), [(4608, 3584), (37888, 3584), (3584, 18944), (64, 16), (57344, 8192)])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_a_split_fits_the_card_and_leaves_no_block_without_work(rows, columns, tokens):
    split = small_batch.choose_split(rows, columns, tokens)
    assert split.shared_bytes(tokens, columns) <= 227 * 1024  # of an H200's multiprocessor
    assert split.cluster == 1 or columns // 16 >= 4 * split.cluster


def test_a_cpu_has_no_kernels():
    assert not small_batch.has_kernels(torch.device("cpu"))


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
        parts = (rows // 2 // 32 * 32, rows - rows // 2 // 32 * 32)
        ranks = 16 * (1 + tokens % 3)
        a = torch.randn(2 * ranks, columns, device="cuda").mul_(0.05).bfloat16()
        b = torch.zeros(rows, 2 * ranks, device="cuda", dtype=torch.bfloat16)
        b[: parts[0], :ranks].normal_(0, size)
        b[parts[0] :, ranks:].normal_(0, size)
        plain, full = (small_batch.reference_product(x, weight, bias, *factors) for factors in ((None, None), (a, b)))
        assert error(small_batch.product(x, weight, bias), plain) < 2.5e-3
        results = [small_batch.product(x, weight, bias, small_batch.shrink(x, a), b, parts) for _ in range(4)]
        assert error(results[0], full) < 2.5e-3
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 33, 256])
@pytest.mark.parametrize("parts", [(3584,), (3584, 512, 512), (1000, 1000)])
def test_the_adapter_beside_another_kernels_product(tokens, parts):
    from qerl.nvfp4.lora import expand_

    rows, ranks = sum(parts), 32
    x = torch.randn(tokens, 896, device="cuda").bfloat16()
    a = torch.randn(ranks * len(parts), 896, device="cuda").mul_(0.05).bfloat16()
    b = torch.zeros(rows, ranks * len(parts), device="cuda", dtype=torch.bfloat16)
    for index, size in enumerate(parts):
        start = sum(parts[:index])
        b[start : start + size, ranks * index : ranks * (index + 1)].normal_()
    base = torch.randn(tokens, rows, device="cuda").bfloat16()
    hidden = (x.double() @ a.double().t()).bfloat16()
    assert error(small_batch.shrink(x, a), hidden.double()) < 2.5e-3
    expected = base.double() + hidden.double() @ b.double().t()
    assert error(expand_(base.clone(), hidden, b, parts), expected) < 2.5e-3
