"""The check at the start reports parts of ours that vLLM does not use.

The classes here are stand-ins. With those of vLLM, the check is part of every engine that opens
(tests/qerl/engine/vllm/test_vllm_engine_gpu.py).
"""

import logging
import sys
from types import SimpleNamespace

import pytest
from torch import nn

from qerl.base.errors import EngineError
from qerl.engine import vllm as vllm_plugin


class Linear(nn.Module):
    quant_method = None


class Norm(nn.Module):
    pass


class Method:
    pass


class OurNorm(Norm):
    pass


class OurSampler:
    pass


class OtherSampler:
    pass


@pytest.fixture
def parts(monkeypatch):
    """A model with one linear, one norm and one attention, all of them ours, and its runner."""
    attention = SimpleNamespace(attends_by_ours=lambda model: model.attends)
    stand_ins = {
        "vllm.model_executor.layers.layernorm": SimpleNamespace(RMSNorm=Norm),
        "vllm.model_executor.layers.linear": SimpleNamespace(LinearBase=Linear),
        "qerl.engine.vllm.attention": attention,
        "qerl.engine.vllm.experts": SimpleNamespace(products=lambda model: {}),
        "qerl.engine.vllm.linear": SimpleNamespace(AdapterLinearMethod=Method),
        "qerl.engine.vllm.layers": SimpleNamespace(NoisyRMSNorm=OurNorm),
        "qerl.engine.vllm.worker": SimpleNamespace(FusedSampler=OurSampler),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    model = nn.Sequential(Linear(), OurNorm())
    model[0].quant_method, model.attends = Method(), True
    return SimpleNamespace(model=model, runner=SimpleNamespace(sampler=OurSampler()))


def warnings_of(parts, caplog, own_attention=True):
    with caplog.at_level(logging.WARNING):
        vllm_plugin.check(parts.model, parts.runner, own_attention)
    return [record.getMessage() for record in caplog.records]


def test_nothing_is_reported_if_all_parts_are_ours(parts, caplog):
    assert warnings_of(parts, caplog) == []


def test_a_sampler_that_was_not_placed_is_named_with_its_runner(parts, caplog):
    parts.runner.sampler = OtherSampler()
    (warning,) = warnings_of(parts, caplog)
    assert "its own sampler" in warning
    assert "OtherSampler; runner types.SimpleNamespace" in warning


def test_a_requested_backend_that_is_not_used_is_reported(parts, caplog):
    parts.model.attends = False
    assert warnings_of(parts, caplog, own_attention=False) == []
    (warning,) = warnings_of(parts, caplog)
    assert "its own attention" in warning


def test_a_linear_that_is_not_ours_is_an_error(parts):
    parts.model[0].quant_method = None
    with pytest.raises(EngineError, match="not qerl's"):
        vllm_plugin.check(parts.model, parts.runner, True)
