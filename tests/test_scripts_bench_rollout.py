"""What scripts/bench_rollout.py tells an engine before it measures; the rest of it runs on a card alone."""

import argparse
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_rollout


@pytest.mark.parametrize("new_tokens", [129, 31, 15])
def test_the_cache_holds_every_sequence_at_its_full_length_and_not_much_more(tmp_path, new_tokens):
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    AutoConfig.for_model("qwen2", **sizes).save_pretrained(tmp_path)
    asked = {"prompt_tokens": 128, "new_tokens": new_tokens, "sequences": [1, 256], "model": str(tmp_path)}
    per_token = 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, width, bytes
    tokens = bench_rollout.cache_bytes(argparse.Namespace(**asked)) / per_token
    blocks_of_one = -(-(128 + new_tokens + 1) // 16)
    assert tokens >= 256 * 16 * blocks_of_one
    assert tokens < 256 * 16 * (blocks_of_one + 1)
