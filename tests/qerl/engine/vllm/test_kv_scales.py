"""Scales of keys and values in vLLM's attention layers, for which there are stand-ins here."""

from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.kv_scales import KVScales
from qerl.engine.vllm.kv_scales import set_scales_


class FlashAttentionImpl:
    pass


class OurImpl(FlashAttentionImpl):
    pass


class FlashInferImpl:
    pass


def layer(impl=OurImpl, query_quant=None):
    scales = {f"_{letter}_scale": torch.tensor(1.0, requires_grad=True) for letter in "qkv"}  # as vLLM leaves them
    on_host = {f"_{letter}_scale_cpu": torch.tensor(1.0) for letter in "kv"}
    return SimpleNamespace(impl=impl(), query_quant=query_quant, **scales, **on_host)


SCALES = {0: KVScales(2.0, 4.0, 0.5), 1: KVScales(8.0, 16.0, 0.25)}


def test_scales_are_written_in_place_and_queries_have_theirs_where_they_are_rounded():
    layers = {0: layer(), 1: layer(query_quant=object())}
    addresses = [one._k_scale.data_ptr() for one in layers.values()]
    assert set_scales_(layers, SCALES) == 2
    assert [one._k_scale.data_ptr() for one in layers.values()] == addresses
    found = [(one._q_scale.item(), one._k_scale.item(), one._v_scale.item()) for one in layers.values()]
    assert found == [(1.0, 4.0, 0.5), (8.0, 16.0, 0.25)]
    assert (layers[1]._k_scale_float, layers[1]._v_scale_cpu.item()) == (16.0, 0.25)


def test_layers_without_scales_and_attention_that_would_not_read_them_are_refused():
    with pytest.raises(EngineError, match="for 2 layers, and 1 have 8-bit ones"):
        set_scales_({0: layer()}, SCALES)
    layers = {0: layer(), 1: layer(FlashInferImpl)}
    with pytest.raises(EngineError, match="attends by FlashInferImpl, whose scales"):
        set_scales_(layers, SCALES)
    assert layers[0]._k_scale == 1  # nothing was written
