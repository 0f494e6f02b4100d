"""The check at the start refuses a model in which vLLM does not use our parts.

The classes here are stand-ins. With those of vLLM, the check is part of every engine that opens
(tests/qerl/engine/vllm/test_vllm_engine_gpu.py).
"""

import sys
from types import SimpleNamespace

import pytest
import torch
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


def layer_of(**changes):
    """Linear attention as vLLM has it, in a model in bfloat16."""
    cache = [torch.zeros(1, dtype=changes.pop("cache", torch.bfloat16))]
    own = {"prefix": "a", "gqa_interleaved_layout": False, "tp_size": 1, "kv_cache": cache, **changes}
    activation = own.pop("activation", "silu")
    weight = torch.zeros(1, dtype=torch.bfloat16)
    return SimpleNamespace(norm=SimpleNamespace(activation=activation), conv1d=SimpleNamespace(weight=weight), **own)


def step_of(**changes):
    of_step = {"num_prefills": 0, "num_decodes": 2, "spec_sequence_masks": None, "num_actual_tokens": 2}
    return SimpleNamespace(non_spec_state_indices_tensor=torch.tensor([5, 7, 0]), **{**of_step, **changes})


@pytest.mark.parametrize(
    ("layer", "metadata", "mode", "taken"),
    [
        ({}, {"a": step_of()}, "full", True),
        ({}, {"a": step_of()}, "none", True),
        ({}, {"a": step_of()}, "piecewise", False),  # captured without knowing the batch
        ({}, None, "none", False),  # vLLM's profile run
        ({}, [{"a": step_of()}], "full", False),  # micro-batches of vLLM
        ({}, {"a": step_of(num_prefills=1)}, "none", False),
        ({}, {"a": step_of(num_decodes=0)}, "none", False),
        ({}, {"a": step_of(spec_sequence_masks=object())}, "full", False),
        ({"gqa_interleaved_layout": True}, {"a": step_of()}, "full", False),  # Qwen3-Next
        ({"tp_size": 2}, {"a": step_of()}, "full", False),
        ({"activation": "sigmoid"}, {"a": step_of()}, "full", False),
        ({"cache": torch.float32}, {"a": step_of()}, "full", False),  # the convolution would not be in place
    ],
)
def test_steps_whose_linear_attention_is_one_launch(monkeypatch, layer, metadata, mode, taken):
    context = SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode)
    stubs = {
        "vllm.config": SimpleNamespace(CUDAGraphMode=SimpleNamespace(PIECEWISE="piecewise")),
        "vllm.forward_context": SimpleNamespace(get_forward_context=lambda: context),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    found = vllm_plugin.states_of_step(layer_of(**layer))
    assert (found.tolist() if taken else found) == ([5, 7] if taken else None)
