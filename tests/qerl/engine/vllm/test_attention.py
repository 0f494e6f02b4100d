"""In which passes attention rotates queries and keys, so that nothing before it does."""

import importlib.util
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
DECODES, OTHERS = {"a": SimpleNamespace(decode_space=object())}, {"a": SimpleNamespace(decode_space=None)}


@pytest.mark.parametrize(
    ("metadata", "mode", "angles", "inside"),
    [
        (DECODES, "NONE", "given", True),
        (DECODES, "FULL", "given", True),
        (DECODES, "PIECEWISE", "given", False),  # its graphs rotated when they were captured
        (OTHERS, "NONE", "given", False),
        ({}, "NONE", "given", False),
        (None, "NONE", "given", False),  # a profile run
        ([DECODES], "NONE", "given", False),
        (DECODES, "NONE", None, False),  # a rotation that another engine of this process has left
    ],
)
def test_attention_rotates_only_in_its_own_decode_steps(monkeypatch, metadata, mode, angles, inside):
    from vllm.config import CUDAGraphMode

    from qerl.engine.vllm import attention

    context = SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=getattr(CUDAGraphMode, mode))
    context.no_compile_layers = {"a": SimpleNamespace(impl=SimpleNamespace(angles=angles))}
    monkeypatch.setattr(attention, "get_forward_context", lambda: context)
    assert attention.rotates_inside("a") is inside
    assert not attention.rotates_inside("b")
