"""What scripts/profile_step.py counts: categories of kernels, idle time, and the weights a step has to read."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import profile_step


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvfp4_linear", "quantized product"),
        ("nvfp4_gemm", "quantized product"),
        ("nvfp4_decode_slabs", "decode weights"),
        ("void humming<MmaOpClass, Shape<0u, 37888u, 3584u>", "quantized product"),
        ("lora_shrink", "adapter"),
        ("nvjet_sm90_tst_64x8_64x16_1x1_h_bz_splitK_TNT", "product"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90", "attention"),
        ("triton_poi_fused_mul_silu_slice_1", "elementwise"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
    ],
)
def test_a_kernel_is_counted_where_a_reader_looks_for_it(name, expected):
    assert profile_step.category(name) == expected


def test_a_summary_adds_up():
    rows = [{"name": "nvfp4_linear", "ms": 2.0, "calls": 4}, {"name": "lora_shrink", "ms": 3.0, "calls": 4}]
    summary = profile_step.summary(rows, wall_ms=6.0)
    assert summary["busy_ms"] == 5.0
    assert summary["categories_ms"] == {"adapter": 3.0, "quantized product": 2.0}
    assert [row["name"] for row in summary["kernels"]] == ["lora_shrink", "nvfp4_linear"]


def test_gaps_are_the_times_in_which_nothing_runs():
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


def test_the_weights_of_qwen2_7b_are_counted_by_hand(tmp_path):
    config = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    body, head = profile_step.parameters(tmp_path)
    # q and o 3584 x 3584, k and v 512 x 3584, gate, up and down 3584 x 18944
    assert body == 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 3584 * 18944) == 6525288448
    assert head == 152064 * 3584
