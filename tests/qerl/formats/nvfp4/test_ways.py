"""Shape and number of tokens decide which way a product takes; a wrong way is never taken."""

import pytest

from qerl.formats.nvfp4.ways import TOKENS, Shape, bucket, summary, unchecked, way_of, wrong_sizes

HOPPER = Shape(4608, 3584, 96, "qerl", fused=True)
HUMMING = Shape(4608, 3584, 96, "humming", fused=False)
AMPERE = Shape(4608, 3584, 96, "portable", fused=True)
MARLIN = Shape(4608, 3584, 96, "marlin", fused=False)


@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        (HOPPER, {1: "fused", 256: "fused", 257: "fused", 512: "fused", 513: "decoded", 8192: "decoded"}),
        (HUMMING, {1: "kernel", 129: "kernel", 512: "kernel", 513: "decoded", 8192: "decoded"}),
        (AMPERE, {1: "fused", 256: "fused", 257: "decoded", 2048: "decoded", 100_000: "decoded"}),
        (MARLIN, {1: "kernel", 256: "kernel", 257: "decoded", 2048: "decoded", 100_000: "decoded"}),
    ],
)
def test_shape_and_size_decide(shape, ends):
    ways = shape.ways()
    assert {tokens: way_of(ways, tokens) for tokens in ends} == ends


def test_the_ways_in_one_line():
    assert summary({HOPPER: HOPPER.ways()}) == "4608x3584 rank 96 qerl: fused to 512, decoded to 2048"


@pytest.mark.parametrize(("ranks", "largest_fused"), [(3 * 160, 512), (3 * 176, 128), (3 * 352, 32), (3 * 1024, 16)])
def test_an_adapter_with_more_hidden_values_than_the_kernel_counts_takes_another_way(ranks, largest_fused):
    """For q/k/v a piece is 16 ranks by 16 tokens (33 to 64 tokens) or by 32 (65 to 256), and there are at most 255
    pieces. With more, the adapter is added to our product of the base."""
    ways = Shape(10240, 8192, ranks, "qerl", fused=True).ways()
    assert [tokens for tokens, way in zip(TOKENS, ways, strict=True) if way == "fused"][-1] == largest_fused
    between = [tokens for tokens, way in zip(TOKENS, ways, strict=True) if way == "kernel"]
    assert between == [tokens for tokens in TOKENS if largest_fused < tokens <= 512]


def test_a_kernel_found_wrong_is_replaced():
    taken = {tokens: way_of(HUMMING.ways({64, 256}), tokens) for tokens in (32, 64, 129, 256, 257)}
    assert taken == {32: "kernel", 64: "decoded", 129: "decoded", 256: "decoded", 257: "kernel"}
    assert way_of(MARLIN.ways({1}), 1) == "decoded"  # slow, but right
    assert [bucket(tokens) for tokens in (1, 3, 17, 64, 65)] == [1, 4, 32, 64, 128]


def test_if_our_product_is_wrong_decoding_replaces_it():
    assert [way_of(HOPPER.ways((), {8}), tokens) for tokens in (4, 8, 16)] == ["fused", "decoded", "fused"]
    assert way_of(HOPPER.ways({8}), 8) == "fused"  # which is not what was wrong


def test_sizes_with_more_than_a_rounding_error_are_wrong_and_reported(caplog):
    assert wrong_sizes("a", {8: 0.004, 16: 0.0049}) == []
    assert not caplog.records
    assert wrong_sizes("512x1408", {8: 0.004, 24: 0.031, 32: float("nan")}) == [24, 32]
    assert "the kernel is wrong by 3.1% for 512x1408 at 24, 32 tokens" in caplog.text
    assert wrong_sizes("512x1408", {8: 0.2}, "our product") == [8]
    assert "our product is wrong by 20.0%" in caplog.text


def test_above_the_checked_sizes_the_kernel_is_left_out():
    assert unchecked([1, 2, 64, 256]) == {512, 1024, 2048}
    assert unchecked([]) == set(TOKENS)
    ways = HUMMING.ways(unchecked([1, 64, 256]))
    assert [way_of(ways, tokens) for tokens in (256, 257, 512)] == ["kernel", "decoded", "decoded"]


def test_columns_that_are_no_whole_blocks_rule_out_our_kernel():
    assert Shape(3584, 18944 + 16, 32, "qerl", fused=True).fits_fused(128)
    assert not Shape(3584, 18944 + 8, 32, "qerl", fused=True).fits_fused(1)
