"""The check at the start refuses a model in which vLLM does not use our parts.

The classes here are stand-ins. With those of vLLM, the check is part of every engine that opens
(tests/qerl/engine/vllm/test_vllm_engine_gpu.py).
"""

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


class OurNorm(Norm):
    pass


class GemmaNorm(nn.Module):
    pass


class OurGemmaNorm(OurNorm, GemmaNorm):
    pass


class Method:
    pass


@pytest.fixture
def parts(monkeypatch):
    """A model with one linear and one norm, both of them ours."""
    stand_ins = {
        "vllm.model_executor.layers.layernorm": SimpleNamespace(RMSNorm=Norm, GemmaRMSNorm=GemmaNorm),
        "vllm.model_executor.layers.linear": SimpleNamespace(LinearBase=Linear),
        "qerl.engine.vllm.experts": SimpleNamespace(products=lambda model: {}),
        "qerl.engine.vllm.linear": SimpleNamespace(AdapterLinearMethod=Method),
        "qerl.engine.vllm.layers": SimpleNamespace(NoisyNorm=OurNorm),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    model = nn.Sequential(Linear(), OurNorm())
    model[0].quant_method = Method()
    return model


def test_a_model_whose_linears_and_norms_are_ours_passes_and_any_other_is_refused(parts):
    vllm_plugin.check(parts)
    method, parts[0].quant_method = parts[0].quant_method, None
    with pytest.raises(EngineError, match=r"not qerl's: .'0'"):
        vllm_plugin.check(parts)
    parts[0].quant_method, parts[1] = method, Norm()
    with pytest.raises(EngineError, match=r"not qerl's: .'1'"):
        vllm_plugin.check(parts)


def test_norms_of_1_plus_weight_are_known_beside_linear_attention_alone(parts):
    parts.append(OurGemmaNorm())
    with pytest.raises(EngineError, match=r"not qerl's: .'2'"):
        vllm_plugin.check(parts)
    parts.linear_attn = nn.ModuleDict({"conv1d": nn.Identity()})
    vllm_plugin.check(parts)
