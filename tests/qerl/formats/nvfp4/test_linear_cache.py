"""The cache of dequantized weights in packed linears."""

import pytest
import torch
from torch import nn

from qerl.formats.linear import cached_weights
from qerl.formats.nvfp4 import reference
from tests.helpers.linear_twins import IN, OUT, output_and_gradient, packed_and_twin

DTYPES = [torch.float32, torch.bfloat16]


# --- the cache, and faster kernels


def count_dequantizations(monkeypatch) -> list[torch.dtype]:
    """Count how often a weight is dequantized."""
    calls, dequantize = [], reference.dequantize_unchecked

    def counting(packed, block_scale, global_scale, dtype):
        calls.append(dtype)
        return dequantize(packed, block_scale, global_scale, dtype)

    monkeypatch.setattr(reference, "dequantize_unchecked", counting)
    return calls


def test_forward_and_backward_dequantize_once_each(monkeypatch):
    packed, twin = packed_and_twin(torch.bfloat16)
    calls = count_dequantizations(monkeypatch)
    x = torch.randn(2, IN).bfloat16()
    assert torch.equal(output_and_gradient(packed, x)[1], output_and_gradient(twin, x)[1])
    assert calls == [torch.bfloat16] * 2


def test_the_cache_dequantizes_once_and_is_freed(monkeypatch):
    packed, twin = packed_and_twin()
    calls = count_dequantizations(monkeypatch)
    x = torch.randn(2, IN)
    with torch.inference_mode(), cached_weights(nn.Sequential(packed)) as cache:
        for _ in range(3):
            assert torch.equal(packed(x), twin(x))
        assert (len(calls), cache.bytes) == (1, 4 * IN * OUT)
    packed(x)
    assert len(calls) == 2


def test_the_cache_serves_a_backward_after_inference_mode():
    packed, twin = packed_and_twin()
    x = torch.randn(2, IN)
    with cached_weights(packed):
        with torch.inference_mode():
            packed(x)
        assert torch.equal(output_and_gradient(packed, x)[1], output_and_gradient(twin, x)[1])


def test_the_cache_stays_within_its_bound(monkeypatch):
    model = nn.Sequential(*(packed_and_twin(sizes=(64, 64), seed=seed)[0] for seed in range(3)))
    calls = count_dequantizations(monkeypatch)
    x = torch.randn(2, 64)
    expected = model(x)
    calls.clear()
    with cached_weights(model, max_bytes=2 * 4 * 64 * 64 + 100) as cache:
        for _ in range(2):
            assert torch.equal(model(x), expected)
    assert cache.bytes == 2 * 4 * 64 * 64
    assert len(calls) == 3 + 1


def test_the_cache_follows_loading_and_casting():
    packed, _ = packed_and_twin(seed=1)
    other, twin = packed_and_twin(seed=2)
    x = torch.randn(2, IN)
    with cached_weights(packed) as cache:
        packed(x)
        packed.load_state_dict(other.state_dict())
        assert torch.equal(packed(x), twin(x))
        packed.bfloat16()
        assert torch.equal(packed(x.bfloat16()), twin.bfloat16()(x.bfloat16()))
        assert cache.bytes == 2 * IN * OUT


def test_the_cache_is_freed_when_the_block_raises(monkeypatch):
    packed, _ = packed_and_twin()
    calls = count_dequantizations(monkeypatch)
    with pytest.raises(RuntimeError, match="shapes"), cached_weights(packed):
        packed(torch.randn(1, IN + 1))
    packed(torch.randn(1, IN))
    assert len(calls) == 2
