"""scripts/bench/profile_step.py: how it counts categories of kernels and idle time."""

import profile_step
import pytest

from qerl.plan.sizes import read_sizes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvfp4_linear", "quantized product"),
        ("nvfp4_gemm", "quantized product"),
        ("nvfp4_decode_slabs", "decode weights"),
        ("void humming<MmaOpClass, Shape<0u, 37888u, 3584u>", "quantized product"),
        ("lora_shrink", "adapter"),
        ("attend", "attention"),
        ("attend_plan", "attention"),
        ("nvjet_sm90_tst_64x8_64x16_1x1_h_bz_splitK_TNT", "product"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90", "attention"),
        ("triton_poi_fused_mul_silu_slice_1", "elementwise"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
    ],
)
def test_a_kernel_is_counted_in_the_expected_category(name, expected):
    assert profile_step.category(name) == expected


def test_a_summary_adds_up():
    rows = [{"name": "nvfp4_linear", "ms": 2.0, "calls": 4}, {"name": "lora_shrink", "ms": 3.0, "calls": 4}]
    summary = profile_step.summary(rows, wall_ms=6.0)
    assert summary["busy_ms"] == 5.0
    assert summary["categories_ms"] == {"adapter": 3.0, "quantized product": 2.0}
    assert [row["name"] for row in summary["kernels"]] == ["lora_shrink", "nvfp4_linear"]


def test_the_bytes_of_decoding_are_counted_from_its_calls():
    """Two micro-batches through a 7B model, forward and backward, in the time their bytes take at half the rate."""
    sizes = read_sizes("Qwen/Qwen2.5-7B")
    moved = sizes.body * 2.5625 / 1e9
    rows = [
        {"name": "nvfp4_decode_slabs", "ms": 1e3 * 4 * moved / 2000, "calls": 4 * 28 * 4},
        {"name": "nvjet", "ms": 9.0, "calls": 7},
    ]
    found = profile_step.decoded(rows, sizes, gb_per_s=4000)
    assert found["decoded_gb"] == pytest.approx(4 * moved)
    assert found["share_of_bandwidth_decoding"] == pytest.approx(0.5)
    assert profile_step.decoded(rows[1:], sizes, gb_per_s=4000) == {}
    assert profile_step.decoded(rows, read_sizes("Qwen/Qwen3-30B-A3B"), gb_per_s=4000) == {}


def test_gaps_are_the_times_when_nothing_runs():
    spans = [
        (10.0, 14.0, "a"),
        (17.0, 18.0, "d"),
        (11.0, 12.0, "b"),
        (13.0, 15.0, "c"),
        (18.0, 19.0, "e"),
        (19.5, 20.0, "f"),
    ]
    assert profile_step.gaps(spans) == [
        {"at_ms": 5.0, "ms": 2.0, "after": "c", "before": "d"},
        {"at_ms": 9.0, "ms": 0.5, "after": "e", "before": "f"},
    ]
    assert profile_step.gaps(spans, 1) == profile_step.gaps(spans)[:1]
    assert profile_step.gaps([]) == []
