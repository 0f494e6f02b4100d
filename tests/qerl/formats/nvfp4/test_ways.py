"""Measured times decide which way a product takes, else the default; a wrong way is never taken."""

import json
import logging
import multiprocessing

import pytest

from qerl.formats.nvfp4.ways import (
    TOKENS,
    Shape,
    bucket,
    measure,
    read_table,
    summary,
    table_path,
    unchecked,
    way_of,
    write_table,
    wrong_sizes,
)

HOPPER = Shape(4608, 3584, 96, "qerl", fused=True)
HUMMING = Shape(4608, 3584, 96, "humming", fused=False)
AMPERE = Shape(4608, 3584, 96, "marlin", fused=False)


@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        (HOPPER, {1: "fused", 256: "fused", 257: "fused", 512: "fused", 513: "decoded", 8192: "decoded"}),
        (HUMMING, {1: "kernel", 129: "kernel", 512: "kernel", 513: "decoded", 8192: "decoded"}),
        (AMPERE, {1: "kernel", 256: "kernel", 257: "decoded", 2048: "decoded", 100_000: "decoded"}),
    ],
)
def test_without_times_the_default_decides(shape, ends):
    ways = shape.ways({})
    assert {tokens: way_of(ways, tokens) for tokens in ends} == ends


def test_the_fastest_way_is_taken_at_each_size():
    """The times are of an imaginary card: fused is best up to 32 tokens, decoding from 64 on."""
    speed = {"fused": lambda n: 5 + n / 2, "kernel": lambda n: 30 + n / 16, "decoded": lambda n: 22 + n / 100}
    times = {HOPPER.name: measure(HOPPER, lambda way, tokens: speed[way](tokens))}
    ways = HOPPER.ways(times)
    assert [way_of(ways, tokens) for tokens in (1, 16, 32, 33, 65, 300, 512, 1000)] == [
        *["fused"] * 3,
        *["decoded"] * 5,
    ]
    assert summary({HOPPER: ways}) == "4608x3584 rank 96 qerl: fused to 32, decoded to 2048"


def test_differences_within_the_scatter_change_nothing():
    times = {"64": {"kernel": 10.0, "fused": 10.2}, "128": {"fused": 10.4, "decoded": 10.0}}
    ways = HOPPER.ways({HOPPER.name: times})
    assert way_of(ways, 64) == "fused"
    assert way_of(ways, 128) == "decoded"


def test_a_way_that_is_wrong_is_neither_measured_nor_taken():
    """Humming and our kernel above 512 tokens, and fused in another layout: a table from elsewhere may name these."""
    for shape in (HOPPER, HUMMING):
        asked = []
        measure(shape, lambda way, tokens, asked=asked: asked.append((way, tokens)) or 1.0)
        assert max(tokens for way, tokens in asked if way == "kernel") == 512
        assert max((tokens for way, tokens in asked if way == "fused"), default=0) == (512 if shape.fused else 0)
        assert {tokens for _, tokens in asked} == set(TOKENS)
    tempting = {str(tokens): {"fused": 0.1, "kernel": 0.2, "decoded": 9.0} for tokens in TOKENS}
    assert set(HOPPER.ways({HOPPER.name: tempting})[-2:]) == {"decoded"}
    assert "fused" not in AMPERE.ways({AMPERE.name: tempting})
    assert "fused" not in HUMMING.ways({HUMMING.name: tempting})
    wide = Shape(57344, 8192, 0, "qerl", fused=True)  # from a 70B model: 0.9 GiB in the memory of the CUDA graphs
    assert "decoded" not in wide.right_ways(512)
    assert wide.right_ways(1024) == ("decoded",)
    zero = {"8": {"fused": 5.0, "kernel": 0.0}, "16": {"kernel": 1.0}}  # a clock that failed, and a missing default
    assert HOPPER.ways({HOPPER.name: zero}) == HOPPER.ways({})


@pytest.mark.parametrize(("ranks", "largest_fused"), [(3 * 160, 512), (3 * 176, 128), (3 * 352, 32), (3 * 1024, 16)])
def test_an_adapter_with_more_hidden_values_than_the_kernel_counts_takes_another_way(ranks, largest_fused):
    """For q/k/v a piece is 16 ranks by 16 tokens (33 to 64 tokens) or by 32 (65 to 256), and there are at most 255
    pieces. With more, the adapter is added to our product of the base."""
    ways = Shape(10240, 8192, ranks, "qerl", fused=True).ways({})
    assert [tokens for tokens, way in zip(TOKENS, ways, strict=True) if way == "fused"][-1] == largest_fused
    between = [tokens for tokens, way in zip(TOKENS, ways, strict=True) if way == "kernel"]
    assert between == [tokens for tokens in TOKENS if largest_fused < tokens <= 512]


def test_another_shape_or_rank_has_its_own_times():
    times = {HOPPER.name: {"64": {"fused": 9.0, "decoded": 1.0}}}
    assert way_of(HOPPER.ways(times), 64) == "decoded"
    assert way_of(Shape(4608, 3584, 0, "qerl", fused=True).ways(times), 64) == "fused"


def test_a_kernel_found_wrong_is_replaced_whatever_the_times_say():
    times = {HOPPER.name: {"64": {"kernel": 1.0, "fused": 9.0}, "256": {"kernel": 1.0, "decoded": 9.0}}}
    ways = HOPPER.ways(times, {64, 256})
    taken = {tokens: way_of(ways, tokens) for tokens in (32, 64, 129, 256, 257)}
    assert taken == {32: "fused", 64: "fused", 129: "fused", 256: "fused", 257: "fused"}
    taken = {tokens: way_of(HUMMING.ways({}, {64, 256}), tokens) for tokens in (32, 64, 129, 256, 257)}
    assert taken == {32: "kernel", 64: "decoded", 129: "decoded", 256: "decoded", 257: "kernel"}
    assert way_of(AMPERE.ways({}, {1}), 1) == "decoded"  # slow, but right
    assert [bucket(tokens) for tokens in (1, 3, 17, 64, 65)] == [1, 4, 32, 64, 128]


def test_if_our_product_is_wrong_decoding_replaces_it_even_where_it_was_a_substitute():
    assert way_of(HOPPER.ways({}, (), {8}), 8) == "decoded"
    assert way_of(HOPPER.ways({}, (), {8}), 16) == "fused"
    times = {HOPPER.name: {"64": {"kernel": 1.0, "fused": 9.0}}}
    assert [way_of(HOPPER.ways(times, *wrong), 64) for wrong in [(), ({64},), ({64}, {64}), ((), {64})]] == [
        *["kernel", "fused"],
        *["decoded", "kernel"],
    ]


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
    ways = HUMMING.ways({}, unchecked([1, 64, 256]))
    assert [way_of(ways, tokens) for tokens in (256, 257, 512)] == ["kernel", "decoded", "decoded"]


def test_columns_that_are_no_whole_blocks_rule_out_our_kernel():
    assert "fused" in Shape(3584, 18944 + 16, 32, "qerl", fused=True).right_ways(128)
    assert "fused" not in Shape(3584, 18944 + 8, 32, "qerl", fused=True).right_ways(1)


def test_a_table_is_kept_and_extended(tmp_path):
    facts = {"card": "made up", "driver": "1"}
    path = table_path(tmp_path / "cache", facts)
    assert read_table(path) == {}
    write_table(path, facts, {"a": {"1": {"kernel": 2.0}}})
    write_table(path, facts, {"b": {"1": {"kernel": 3.0}}})
    assert read_table(path) == {"a": {"1": {"kernel": 2.0}}, "b": {"1": {"kernel": 3.0}}}
    assert json.loads(path.read_text())["card"] == "made up"
    assert path != table_path(tmp_path / "cache", {"card": "made up", "driver": "2"})
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"times_us": {"a": 3}}', '{"times_us": {"a": {"1": {"kernel": "x"}}}}']
)
def test_with_a_damaged_table_the_default_is_used_and_a_warning_given(tmp_path, caplog, text):
    path = tmp_path / "ways-0.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert read_table(path) == {}
    assert "chosen by default" in caplog.text
    write_table(path, {}, {"a": {"1": {"kernel": 2.0}}})
    assert read_table(path) == {"a": {"1": {"kernel": 2.0}}}


def _write_often(path, name):
    for turn in range(30):
        write_table(path, {}, {name: {"1": {"kernel": float(turn)}}})


def test_a_reader_never_sees_half_a_table(tmp_path):
    path = tmp_path / "ways-0.json"
    write_table(path, {}, {"a": {"1": {"kernel": 1.0}}})
    writer = multiprocessing.get_context("spawn").Process(target=_write_often, args=(path, "b"))
    writer.start()
    while writer.is_alive():
        assert json.loads(path.read_text())["times_us"]
    writer.join()
    assert writer.exitcode == 0
    assert read_table(path)["b"] == {"1": {"kernel": 29.0}}
